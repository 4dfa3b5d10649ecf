"""What the ranks hold is the whole, split: of checkpoints and of dummy weights, whatever can be shared out evenly."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.config import Config, check_ranks
from nanovllm.engine.ranked_runner import rank_devices
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.registry import build_model
from nanovllm.models.weights import destinations_of, init_dummy_weights, load_weights
from nanovllm.parallel import TensorParallel
from tests.checkpoints import make_qwen2_5_vl, make_qwen3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 KV heads, and feed-forward sizes and a vocabulary that no number of ranks divides."""
    return make_qwen2_5_vl(tmp_path_factory.mktemp("model"), intermediate_size=97, vocab_padding=4,
                           vision=dict(num_heads=4, hidden_size=64, intermediate_size=79))


def build(folder: Path, parallel: TensorParallel, dummy: bool = False) -> CausalLM:
    model = build_model(ModelConfig.from_folder(folder), select_backend("torch", "cpu"), torch.float32, "cpu", parallel)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))       # what no weight and no padding fills is seen
    if dummy:
        init_dummy_weights(model, 0)
    else:
        load_weights(model, folder)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return model


def put_together(models: list[CausalLM]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint from the parts that the ranks have of it."""
    whole: dict[str, Tensor] = {}
    for model in models:
        for name, destination in destinations_of(model).items():
            tensor = whole.setdefault(name, torch.full(destination.shape, float("nan")))
            for part, view in destination.parts:
                kept = view[tuple(map(slice, tensor[part].shape))]
                assert view.sum() == pytest.approx(kept.sum().item(), abs=1e-4)       # padding is zero
                tensor[part] = kept
    return whole


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_shares_make_up_the_whole(folder: Path, size: int, dummy: bool) -> None:
    alone = put_together([build(folder, TensorParallel(), dummy)])
    shared = put_together([build(folder, TensorParallel(rank, size), dummy) for rank in range(size)])
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_each_rank_has_its_share_alone(folder: Path) -> None:
    def num_values(parallel: TensorParallel) -> int:
        return sum(p.numel() for p in build_model(ModelConfig.from_folder(folder), select_backend("torch", "cpu"),
                                                  torch.float32, "cpu", parallel).parameters())

    whole = num_values(TensorParallel())
    assert num_values(TensorParallel(0, 2)) < 0.6 * whole
    assert num_values(TensorParallel(3, 4, spread_images=True)) > num_values(TensorParallel(3, 4))


def test_only_the_share_is_read(folder: Path) -> None:
    sizes: list[int] = []

    class Spy:
        def __init__(self, stored: object) -> None:
            self.stored = stored

        def get_shape(self) -> list[int]:
            return self.stored.get_shape()      # type: ignore[attr-defined]

        def __getitem__(self, part: object) -> Tensor:
            sizes.append((kept := self.stored[part]).numel())       # type: ignore[index]
            return kept

    from nanovllm.models import weights
    stored_tensors = weights._stored_tensors
    with mock.patch.object(weights, "_stored_tensors", lambda path: ((n, Spy(s)) for n, s in stored_tensors(path))):
        model = build(folder, TensorParallel(1, 4))
    assert sum(sizes) <= sum(parameter.numel() for parameter in model.parameters())


def test_tied_heads_are_compared_by_every_rank(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path, tie=True, store_head=True, vocab_padding=1)
    for rank in range(2):
        assert build(folder, TensorParallel(rank, 2)).lm_head is None


@pytest.mark.parametrize("key_value_heads, parts", [
    (4, [(0, 8), (8, 16), (16, 24), (24, 32)]), (8, [(0, 16), (16, 32), (32, 48), (48, 64)]),
    (2, [(0, 8), (0, 8), (8, 16), (8, 16)]), (1, [(0, 8)] * 4)])
def test_key_value_heads_are_split_or_copied(key_value_heads: int, parts: list[tuple[int, int]]) -> None:
    shares = [TensorParallel(rank, 4).split_kv(key_value_heads, 8) for rank in range(4)]
    assert [(share.start, share.stop) for share in shares] == parts
    assert {share.size for share in shares} == {parts[0][1]}


# ---------------------------------------------------------------- what cannot be shared out

def sized(folder: Path, heads: int, kv_heads: int, vision_heads: int) -> ModelConfig:
    config = ModelConfig.from_folder(folder)
    assert config.vision is not None
    return replace(config, text=replace(config.text, num_heads=heads, num_kv_heads=kv_heads),
                   vision=replace(config.vision, num_heads=vision_heads, intermediate_size=3420))


@pytest.mark.parametrize("ranks, heads, kv_heads, vision_heads, message", [
    (8, 12, 2, 16, r"tensor_parallel_size=8: 12 attention heads .* 8 ranks; give one of \[1, 2, 4\]$"),
    (4, 12, 6, 16, r"6 key-value heads .*give one of \[1, 2\]$"),
    (4, 12, 4, 6, r"6 vision heads .* 4 ranks; give one of \[1, 2\], or vision_parallel=\"data\"")])
def test_uneven_heads_are_refused_with_the_numbers(
        folder: Path, ranks: int, heads: int, kv_heads: int, vision_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ranks(ranks, "split", sized(folder, heads, kv_heads, vision_heads))


def test_what_is_padded_or_copied_is_not_refused(folder: Path) -> None:
    check_ranks(8, "split", sized(folder, 16, 2, 16))            # a vision MLP of 3420, 2 KV heads for 8 ranks
    check_ranks(4, "data", sized(folder, 12, 4, 6))


def test_refused_before_anything_starts(folder: Path) -> None:
    with mock.patch("subprocess.Popen", side_effect=AssertionError("a process was started")):
        with pytest.raises(ValueError, match="4 attention heads cannot be shared out evenly over 3 ranks"):
            Config(str(folder), tensor_parallel_size=3)
        with mock.patch("torch.cuda.device_count", return_value=4), \
                pytest.raises(ValueError, match="tensor_parallel_size=4, but there are 2 GPUs from cuda:2 on"):
            rank_devices(torch.device("cuda", 2), 4)
