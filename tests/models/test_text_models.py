"""Logits of both language models against transformers: prompts cut into random spans over paged KV."""
from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanovllm.attention import select_backend
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.layer_stage import FinalRows, LayerStage
from nanovllm.models.registry import build_model
from nanovllm.models.weights import load_weights
from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.paged import Pages, Span, new_cache, random_steps, run_spans

YARN = dict(rope_theta=5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
MROPE_YARN = YARN | dict(mrope_section=[2, 3, 3])
LENGTHS = (41, 7, 90)

QWEN3 = {
    "plain": {},
    "tied": dict(tie=True),
    "biases": dict(attention_bias=True, num_key_value_heads=1),
    "odd sizes": dict(num_attention_heads=6, num_key_value_heads=3, head_dim=20, hidden_size=56),
    "no groups": dict(num_key_value_heads=4, vocab_padding=13),
    "yarn": dict(rope=YARN),
    "yarn, new config": dict(rope=YARN | dict(attention_factor=1.3, beta_fast=16.0), new_config=True),
}
QWEN2_5_VL = {
    "plain": {},
    "tied, new config": dict(tie=True, new_config=True, new_names=True),
    "groups of 4": dict(num_key_value_heads=1),
    "yarn": dict(rope=MROPE_YARN, new_config=True),
}


def load(path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CausalLM:
    model = build_model(ModelConfig.from_folder(path), select_backend("auto", device, dtype), dtype, device)
    load_weights(model, path)
    return model


def random_ids(model: CausalLM, lengths: tuple[int, ...], device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, 250, (length,), generator=generator).to(device) for length in lengths]


def image_positions(length: int) -> Tensor:
    """Text, then a picture of 3 x 4 merged rows if there is room, then text: int64 [3, tokens]."""
    before, rows = 2, 12
    if length < before + rows:
        return torch.arange(length).expand(3, -1)
    h, w = np.divmod(np.arange(rows), 4)
    picture = before + np.stack((0 * h, h, w))
    after = before + 4 + np.arange(length - before - rows)
    return torch.from_numpy(np.concatenate((np.tile(np.arange(before), (3, 1)), picture, np.tile(after, (3, 1))), 1))


def compare(model: CausalLM, reference, ids: list[Tensor], positions: list[Tensor], block_size: int) -> None:
    rng = random.Random(block_size)
    pages = Pages([len(x) for x in ids], block_size, rng)
    embeddings = [model.embed(x) for x in ids]
    steps = random_steps([len(x) for x in ids], rng)
    logits = run_spans(model, embeddings, positions, steps, pages, new_cache(model, pages))
    for ours, token_ids, places in zip(logits, ids, positions):
        position_ids = places if places.shape[0] == 1 else places[:, None]
        expected = reference(input_ids=token_ids[None], position_ids=position_ids).logits[0]
        assert expected.std() > 0.3, "logits this flat prove nothing"
        assert ours.dtype == torch.float32 and ours.shape == expected.shape
        assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("options", QWEN3.values(), ids=QWEN3.keys())
@torch.inference_mode()
def test_qwen3_in_spans_equals_transformers(tmp_path, options, block_size):
    path = make_qwen3(tmp_path, **options)
    model, reference = load(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = random_ids(model, LENGTHS)
    compare(model, reference, ids, [torch.arange(len(x))[None] for x in ids], block_size)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("options", QWEN2_5_VL.values(), ids=QWEN2_5_VL.keys())
@torch.inference_mode()
def test_qwen2_5_vl_decoder_in_spans_equals_transformers(tmp_path, options, block_size):
    path = make_qwen2_5_vl(tmp_path, **options)
    model, reference = load(path), AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids = random_ids(model, LENGTHS)
    compare(model, reference, ids, [image_positions(len(x)) for x in ids], block_size)


@torch.inference_mode()
def test_published_and_new_names_give_one_model(tmp_path):
    published = load(make_qwen2_5_vl(tmp_path / "a", num_shards=3))
    new = load(make_qwen2_5_vl(tmp_path / "b", new_names=True, new_config=True))
    for (name, ours), (other_name, other) in zip(published.named_parameters(), new.named_parameters(), strict=True):
        assert name == other_name and torch.equal(ours, other)


@pytest.mark.parametrize("dtype,limit", [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
@torch.inference_mode()
def test_half_precision_is_near(tmp_path, dtype, limit):
    path, positions = make_qwen3(tmp_path), [torch.arange(n)[None] for n in LENGTHS]
    results = []
    for kind in (torch.float32, dtype):
        model, rng = load(path, kind), random.Random(0)
        pages, ids = Pages(LENGTHS, 16, rng), random_ids(model, LENGTHS)
        logits = run_spans(model, [model.embed(x) for x in ids], positions, random_steps(LENGTHS, rng), pages,
                           new_cache(model, pages))
        results.append(torch.cat(logits).log_softmax(-1))
    assert (results[0] - results[1]).abs().max() < limit


@torch.inference_mode()
def test_rows_dropped_at_a_layer_use_the_kv_that_is_there(tmp_path):
    """Two sequences with KV in place; from layer 1 and again from layer 2 on, fewer rows are computed."""
    model = load(make_qwen3(tmp_path, num_hidden_layers=4))
    lengths = (30, 11)
    pages, ids = Pages(lengths, 4, random.Random(0)), random_ids(model, lengths)
    kv_cache, positions = new_cache(model, pages), [torch.arange(n)[None] for n in lengths]
    whole = [(seq, 0, n) for seq, n in enumerate(lengths)]
    full = run_spans(model, [model.embed(x) for x in ids], positions, [whole], pages, kv_cache)
    kept: list[list[Span]] = [
        [(0, 3, 20), (0, 25, 30), (1, 2, 11)], [(0, 3, 9), (0, 26, 30), (1, 9, 11)], [(0, 29, 30), (1, 10, 11)]]
    tokens = [[(seq, token) for seq, start, stop in spans for token in range(start, stop)] for spans in kept]
    rows = [None] + [torch.tensor([above.index(token) for token in below]) for above, below in pairwise(tokens)]
    stages = [LayerStage(first, r, pages.batch(spans)) for first, r, spans in zip((0, 1, 3), rows, kept)]
    hidden = torch.stack([model.embed(ids[seq][token]) for seq, token in tokens[0]])
    places = torch.tensor([[token for _, token in tokens[0]]])
    out = model.compute_logits(model(hidden, places, kv_cache, stages)).float()
    assert out.shape[0] == 2
    for logits, expected in zip(out, full):
        torch.testing.assert_close(logits, expected[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_layers", [1, 3])
@torch.inference_mode()
def test_final_rows_are_those_of_all_rows_and_all_kv_is_stored(tmp_path, num_layers):
    model = load(make_qwen3(tmp_path, num_hidden_layers=num_layers))
    lengths, wanted = (9, 14), [(0, 8), (1, 3), (1, 13)]
    pages, ids = Pages(lengths, 4, random.Random(0)), random_ids(model, lengths)
    hidden, positions = torch.cat([*map(model.embed, ids)]), torch.cat([torch.arange(n) for n in lengths])[None]
    stages = [LayerStage(0, None, pages.batch([(0, 0, 9), (1, 0, 14)]))]
    rows = torch.tensor([seq * 9 + token for seq, token in wanted])
    caches = new_cache(model, pages), new_cache(model, pages)
    everything = model(hidden, positions, caches[0], stages)
    final = FinalRows(rows, pages.batch([(seq, token, token + 1) for seq, token in wanted]))
    torch.testing.assert_close(model(hidden, positions, caches[1], stages, final), everything[rows])
    torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 2e-3), (torch.bfloat16, 0.3)])
@torch.inference_mode()
def test_qwen3_on_the_gpu_equals_the_cpu(tmp_path, dtype, limit):
    path, positions = make_qwen3(tmp_path), [torch.arange(n)[None] for n in LENGTHS]
    results = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model, rng = load(path, kind, device), random.Random(0)
        pages, ids = Pages(LENGTHS, 16, rng), random_ids(model, LENGTHS, device)
        logits = run_spans(model, [model.embed(x) for x in ids], [x.to(device) for x in positions],
                           random_steps(LENGTHS, rng), pages, new_cache(model, pages))
        results.append(torch.cat(logits).cpu().log_softmax(-1))
    assert (results[0] - results[1]).abs().max() < limit
