"""Config checks every option, resolves what depends on the model, and says which path it could not read."""
from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from nanovllm import LLM
from nanovllm.config import Config, resolve_model_path
from tests.checkpoints import make_qwen2_5_vl, make_qwen3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_qwen3(tmp_path_factory.mktemp("qwen3"), max_position_embeddings=5000, dtype=torch.bfloat16))


def test_defaults(model: str) -> None:
    config = Config(model)
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert given.pop("model_config").text.num_layers == 3
    assert given == dict(
        model=model, max_num_batched_tokens=16384, max_num_seqs=512, max_model_len=4096, gpu_memory_utilization=0.9,
        tensor_parallel_size=1, enforce_eager=False, kvcache_block_size=256, num_kvcache_blocks=-1,
        kvcache_memory_gb=1.0, encoder_cache_ratio=0.2, recompute_ratio=0.0, reuse_any_ordinal=False,
        image_kv_variants=4, enable_prefix_caching=True, dtype="bfloat16", device=None, load_format="auto",
        attention_backend="auto", overlap=None, seed=None, vision_parallel="split")


def test_length_follows_the_model(model: str, tmp_path: Path) -> None:
    assert Config(model, max_model_len=10**9).max_model_len == 5000
    assert Config(model, max_model_len=5).max_model_len == 5
    assert Config(str(make_qwen3(tmp_path / "short", max_position_embeddings=100))).max_model_len == 100
    assert Config(str(make_qwen2_5_vl(tmp_path / "vl", max_position_embeddings=128000))).max_model_len == 32768
    assert Config(str(make_qwen2_5_vl(tmp_path / "vl2", max_position_embeddings=6000))).max_model_len == 6000


def test_dtype_is_a_torch_dtype_or_its_name(model: str) -> None:
    assert Config(model, dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]
    assert Config(model, dtype="float32").dtype == "float32"
    with pytest.raises(ValueError, match="dtype='int8'"):
        Config(model, dtype=torch.int8)  # type: ignore[arg-type]


@pytest.mark.parametrize("name, values", [
    ("max_num_batched_tokens", [0, -1, 1.5, True, "64", None]),
    ("max_num_seqs", [0, 2.0, None]),
    ("max_model_len", [0, -5, 10.0, "10", True]),
    ("gpu_memory_utilization", [0.0, 1.01, -1, math.nan, True, "0.9"]),
    ("tensor_parallel_size", [0, -1, True, 2.0]),
    ("enforce_eager", [0, 1, "yes", None]),
    ("kvcache_block_size", [0, -256, 100, 256.0, True, "256"]),
    ("num_kvcache_blocks", [0, -2, 1.0, True, None]),
    ("kvcache_memory_gb", [0, -1, math.inf, "1"]),
    ("encoder_cache_ratio", [1.0, -0.1, math.nan, True]),
    ("recompute_ratio", [1.5, -0.1, math.nan, True, "0.1", None, [0.1, 0.2, 0.3]]),
    ("reuse_any_ordinal", [1, None]),
    ("image_kv_variants", [0, 1.5]),
    ("enable_prefix_caching", [1, None]),
    ("dtype", ["float64", "int8", None]),
    ("device", ["tpu", 0]),
    ("load_format", ["pt", None]),
    ("attention_backend", ["flashy", None]),
    ("overlap", [0, 1, "no"]),
    ("seed", [-1, 2**63, True, 1.0]),
])
def test_wrong_values_are_named(model: str, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}=.*: give "):
            Config(model, **{name: value})


def test_ratio_per_layer_has_one_number_a_layer(model: str) -> None:
    assert Config(model, recompute_ratio=[0.5, 0.25, 0]).recompute_ratio == (0.5, 0.25, 0.0)  # type: ignore[arg-type]
    assert Config(model, recompute_ratio=[0.5, 0.5, 0.5]).recompute_ratio == 0.5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 numbers.* 3 decoder layers"):
        Config(model, recompute_ratio=[0.5] * 4)  # type: ignore[arg-type]


def test_unknown_option_is_named_before_the_path_is_read() -> None:
    for make in (Config, LLM):
        with pytest.raises(TypeError, match="recompute_ration"):
            make("/nowhere", recompute_ration=0.1)


def test_replace_makes_a_changed_config(model: str) -> None:
    config = Config(model, recompute_ratio=[0.5, 0.25, 0])  # type: ignore[arg-type]
    changed = dataclasses.replace(config, num_kvcache_blocks=7)
    assert dataclasses.replace(changed, num_kvcache_blocks=-1) == config != changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1  # type: ignore[misc]


def test_missing_folders_are_named_and_never_sent_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    for path in (str(tmp_path / "nowhere"), "./nowhere/here", "../nowhere", "~/no/where", "nowhere", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=path):
            Config(path)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
        Config(str(tmp_path))
    for wrong in ("", None, 5):
        with pytest.raises(ValueError, match="model="):
            Config(wrong)  # type: ignore[arg-type]


def test_hub_id_is_downloaded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, "*.safetensors" in allow_patterns))
        return model

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert Config("Qwen/Qwen3-0.6B").model == model
    assert Config("Qwen/Qwen3-0.6B", load_format="dummy").model == model      # needs no weights
    assert asked == [("Qwen/Qwen3-0.6B", True), ("Qwen/Qwen3-0.6B", False)]


def test_hub_without_network_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **_: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"Qwen/Qwen3-0.6B is not a folder here.*no network.*give the folder"):
        resolve_model_path("Qwen/Qwen3-0.6B")


def test_home_folder_is_expanded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(model).parent))
    assert resolve_model_path(f"~/{Path(model).name}") == model


def test_ratio_from_a_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    file.write_text('{"recompute_ratio": [0.5, 0.25, 0]}')
    assert Config(model, recompute_ratio=str(file)).recompute_ratio == (0.5, 0.25, 0.0)  # type: ignore[arg-type]
    file.write_text("0.25")
    assert Config(model, recompute_ratio=file).recompute_ratio == 0.25  # type: ignore[arg-type]
    for wrong in ("[0.1, 0.2, 0.3]", "[0.1]", "[2]", "{}", "[", '["a"]', "null", "[]"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="give "):
            Config(model, recompute_ratio=str(file))  # type: ignore[arg-type]


def test_auto_ratio_is_the_model_folders(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model")
    with pytest.raises(ValueError, match=r"recompute_ratio='auto': give .* nanovllm.calibrate"):
        Config(str(folder), recompute_ratio="auto")  # type: ignore[arg-type]
    (folder / "reuse.json").write_text('{"recompute_ratio": [0.5, 0.25, 0]}')
    assert Config(str(folder), recompute_ratio="auto").recompute_ratio == (0.5, 0.25, 0.0)  # type: ignore[arg-type]
