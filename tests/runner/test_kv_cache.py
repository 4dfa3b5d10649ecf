"""KV that moves against a copy token by token and a fresh rotation, and pools that fill their budget."""
from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.layers.rotary import apply_rotary, inverse_frequencies
from nanovllm.plan import KVCopy
from nanovllm.runner import kv_cache
from nanovllm.runner.kv_cache import (
    allocate_kv_cache,
    allocate_zeros,
    kv_block_bytes,
    layer_runs,
    move_kv,
    sizes_of_budget,
    sizes_of_kv_bytes,
)

LAYERS, BLOCK, HEADS, DIM = 4, 4, 2, 16
INV_FREQ = inverse_frequencies(5000.0, DIM)


def random_pool(num_blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randn(LAYERS, 2, num_blocks, BLOCK, HEADS, DIM, generator=generator).to(dtype)


def turned(keys: Tensor, positions: int) -> Tensor:
    """Keys [..., dim] turned by `positions`, as the rotary layer turns them."""
    angle = positions * INV_FREQ.double()
    return apply_rotary(keys[None], (angle.cos().float()[None], angle.sin().float()[None]))[0]


def move_token_by_token(pool: Tensor, copy: KVCopy) -> None:
    for layer in range(LAYERS):
        first = copy.first_rows[layer % len(copy.first_rows)]
        for row in range(first, copy.num_tokens):
            source, target = copy.source_start + row, copy.target_start + row
            key, value = pool[layer, :, copy.source_blocks[source // BLOCK], source % BLOCK]
            block, offset = copy.target_blocks[target // BLOCK], target % BLOCK
            pool[layer, 0, block, offset] = turned(key, copy.delta)
            pool[layer, 1, block, offset] = value


@pytest.mark.parametrize("first_rows", [(0,), (3,), (9, 9, 4, 0), (30, 2, 2, 2)])
@pytest.mark.parametrize("gather_bytes", [1, 1 << 20])
@pytest.mark.parametrize("delta", [0, 1, -37, 4000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moves_equal_those_of_single_tokens(monkeypatch, first_rows, gather_bytes, delta, device):
    monkeypatch.setattr(kv_cache, "MAX_GATHER_BYTES", gather_bytes)
    rng = random.Random(delta)
    blocks = rng.sample(range(20), 16)
    copies = [KVCopy(tuple(blocks[:6]), 1, tuple(blocks[6:12]), 2, 21, delta, first_rows),
              KVCopy(tuple(blocks[:2]), 5, tuple(blocks[12:]), 11, 3, -delta, (0,))]
    expected, moved = random_pool(20), random_pool(20)
    for copy in copies:
        move_token_by_token(expected, copy)
    moved = moved.to(device)
    move_kv(moved, copies, INV_FREQ)
    moved = moved.cpu()
    assert (moved - expected).abs().max() < 1e-6
    untouched = expected == random_pool(20)
    assert torch.equal(moved[untouched], expected[untouched]) and untouched.float().mean() > 0.5


@pytest.mark.parametrize("delta", [0, 1, 7, 100, 4000])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2.0**-7)])
def test_moved_keys_equal_a_fresh_rotation(delta, dtype, tolerance):
    raw = torch.randn(10, HEADS, DIM)                       # keys before any rotation
    positions = torch.arange(10) + 3
    pool = torch.zeros(LAYERS, 2, 8, BLOCK, HEADS, DIM, dtype=dtype)

    def rotated(places: Tensor) -> Tensor:
        angles = places.double()[:, None] * INV_FREQ.double()
        return apply_rotary(raw, (angles.cos().float(), angles.sin().float())).to(dtype)

    pool[:, 0].view(LAYERS, -1, HEADS, DIM)[:, :10] = rotated(positions)
    move_kv(pool, [KVCopy((0, 1, 2), 0, (4, 5, 6, 7), 5, 10, delta, (0,))], INV_FREQ)
    moved = pool[:, 0].view(LAYERS, -1, HEADS, DIM)[:, 21:31]
    fresh = rotated(positions + delta)
    assert (moved - fresh).abs().max() <= (tolerance * fresh.abs().max() if delta else 0)


def test_runs_of_layers_with_one_first_row():
    assert list(layer_runs((5,), 3)) == [(0, 3, 5)]
    assert list(layer_runs((9, 9, 4, 0, 0), 5)) == [(0, 2, 9), (2, 3, 4), (3, 5, 0)]


# ---------------------------------------------------------------- sizes

def model_config(vision: bool) -> Any:
    text = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=32, hidden_size=64)
    return SimpleNamespace(text=text, vision=SimpleNamespace() if vision else None)


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("budget", [10**7, 10**8 + 12345])
def test_the_caches_fill_the_budget_and_share_it_by_the_ratio(ratio, budget):
    block_bytes = kv_block_bytes(model_config(True).text, 256, torch.bfloat16)
    assert block_bytes == allocate_kv_cache(model_config(True).text, 1, 256, torch.bfloat16, torch.device("cpu")).nbytes
    sizes = sizes_of_budget(budget, model_config(True), 256, torch.bfloat16, ratio)
    kv_bytes, encoder_bytes = sizes.num_kvcache_blocks * block_bytes, sizes.encoder_num_blocks * 256 * 64 * 2
    assert budget - block_bytes / (1 - ratio) - 256 * 64 * 2 - 1 <= kv_bytes + encoder_bytes <= budget
    assert encoder_bytes <= kv_bytes * ratio / (1 - ratio) < encoder_bytes + 256 * 64 * 2
    text = sizes_of_budget(budget, model_config(False), 256, torch.bfloat16, ratio)
    assert text.num_kvcache_blocks == budget // block_bytes and text.encoder_num_blocks == 0


def test_no_room_for_a_block_is_an_error_with_the_numbers():
    block_bytes = kv_block_bytes(model_config(True).text, 256, torch.float32)
    assert sizes_of_kv_bytes(block_bytes, model_config(True), 256, torch.float32, 0.2).num_kvcache_blocks == 1
    with pytest.raises(ValueError, match=r"0\.000 GiB are left .* 256 tokens takes 0\.000 GiB; raise"):
        sizes_of_kv_bytes(block_bytes - 1, model_config(True), 256, torch.float32, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_of_any_dtype_and_of_no_blocks(dtype):
    zeros = allocate_zeros((3, 5), dtype, torch.device("cpu"))
    assert zeros.shape == (3, 5) and zeros.dtype == dtype and not zeros.any()
    zeros[1] = 1
    assert zeros.sum() == 5
    assert allocate_zeros((0, 5), dtype, torch.device("cpu")).shape == (0, 5)
