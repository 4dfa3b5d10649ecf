"""The memory of the caches: how many blocks fit, the tensors that hold them, and KV moved from place to place."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.contract import FusedOps
from nanovllm.model_config import ModelConfig, TextConfig
from nanovllm.plan import KVCopy
from nanovllm.runner.inputs import block_slots, host_tensor
from nanovllm.runner.staging import to_device

MAX_GATHER_BYTES = 64 << 20         # KV that one pass of `move_kv` holds outside the pool

GIB = 1 << 30


# ---------------------------------------------------------------- sizes

@dataclass(frozen=True)
class CacheSizes:
    """How the caches of one engine share their memory."""

    num_kvcache_blocks: int
    encoder_num_blocks: int     # 0 for a model without vision


def kv_block_bytes(text: TextConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block: keys and values of `block_size` tokens in all layers."""
    return 2 * text.num_layers * block_size * text.num_kv_heads * text.head_dim * dtype.itemsize


def sizes_of_kv_bytes(kv_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype,
                      encoder_ratio: float) -> CacheSizes:
    """The KV blocks in `kv_bytes`, and the encoder blocks beside them: `encoder_ratio` of the bytes of both together.

    Raises ValueError with the numbers if not even one KV block fits.
    """
    block_bytes = kv_block_bytes(config.text, block_size, dtype)
    num_blocks = kv_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"no room for a KV cache: {kv_bytes / GIB:.3f} GiB are left for it, and one block of {block_size} tokens "
            f"takes {block_bytes / GIB:.3f} GiB; raise gpu_memory_utilization (on the CPU kvcache_memory_gb), or lower "
            "max_num_batched_tokens or max_model_len")
    if config.vision is None:
        return CacheSizes(num_blocks, 0)
    encoder_block_bytes = block_size * config.text.hidden_size * dtype.itemsize
    beside = num_blocks * block_bytes * encoder_ratio / (1 - encoder_ratio)
    return CacheSizes(num_blocks, int(beside) // encoder_block_bytes)


def sizes_of_budget(budget: int, config: ModelConfig, block_size: int, dtype: torch.dtype,
                    encoder_ratio: float) -> CacheSizes:
    """KV and encoder blocks that together fill `budget` bytes; raises ValueError as `sizes_of_kv_bytes` does."""
    kv_bytes = budget if config.vision is None else int(budget * (1 - encoder_ratio))
    return sizes_of_kv_bytes(kv_bytes, config, block_size, dtype, encoder_ratio)


# ---------------------------------------------------------------- pools

def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on the CPU the system backs its pages with memory as they are written."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def allocate_kv_cache(text: TextConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
                      device: torch.device) -> Tensor:
    """The KV pool `[layers, 2, blocks, block_size, kv_heads, head_dim]`; index 0 of axis 1 are keys, 1 values."""
    shape = (text.num_layers, 2, num_blocks, block_size, text.num_kv_heads, text.head_dim)
    return allocate_zeros(shape, dtype, device)


def free(tensor: Tensor) -> None:
    """Gives a tensor's memory back, whoever still refers to it; that of a pool on the CPU, which is numpy's, goes with
    the last reference."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


# ---------------------------------------------------------------- moves

def move_kv(kv_cache: Tensor, copies: Sequence[KVCopy], inv_freq: Tensor, fused: FusedOps | None = None) -> None:
    """Carries out `copies` in the pool `[layers, 2, blocks, block_size, kv_heads, head_dim]`, one after the other.

    Keys are turned by `delta * inv_freq` (on the host, `[head_dim / 2]`, radians per position) in float32 and rounded
    once; the same delta on every axis makes `mrope_section` irrelevant. Values are copied. In layer `l` the rows before
    `first_rows[l]` of a copy are left alone. No target of a copy may be a source of this or a later one.
    """
    num_layers, _, _, block_size, kv_heads, head_dim = kv_cache.shape
    pool = kv_cache.view(num_layers, 2, -1, kv_heads, head_dim)      # by slot
    moves = []
    for copy in copies:
        sources, targets = (host_tensor(block_slots(blocks, start, start + copy.num_tokens, block_size))
                            for blocks, start in ((copy.source_blocks, copy.source_start),
                                                  (copy.target_blocks, copy.target_start)))
        first_rows = host_tensor(np.broadcast_to(np.asarray(copy.first_rows, np.int64), num_layers))
        moves.append((sources, targets, first_rows, rotation_by(copy.delta, inv_freq) if copy.delta else None))
    for copy, (sources, targets, first_rows, turn) in zip(copies, to_device(moves, pool.device)):
        if fused is not None:
            fused.move_kv(pool, sources, targets, first_rows, turn)
            continue
        for first, stop, row in layer_runs(copy.first_rows, num_layers):
            if row < copy.num_tokens:
                row_bytes = 2 * kv_heads * head_dim * pool.element_size() * (copy.num_tokens - row)
                _move_rows(pool[first:stop], sources[row:], targets[row:], turn, max(1, MAX_GATHER_BYTES // row_bytes))


def layer_runs(first_rows: Sequence[int], num_layers: int) -> Iterator[tuple[int, int, int]]:
    """(first layer, layer behind the last, first row) for each run of layers with one first row."""
    rows = np.broadcast_to(np.asarray(first_rows), num_layers)
    edges = [0, *(np.flatnonzero(np.diff(rows)) + 1).tolist(), num_layers]
    for first, stop in pairwise(edges):
        yield first, stop, int(rows[first])


def rotation_by(delta: int, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[head_dim / 2]`, of a shift by `delta` positions; the angle is exact to float64."""
    angle = inv_freq.double() * delta
    return angle.cos().float(), angle.sin().float()


def _move_rows(pool: Tensor, sources: Tensor, targets: Tensor, turn: tuple[Tensor, Tensor] | None,
               layers_a_pass: int) -> None:
    """Slots `sources` of all layers of pool `[layers, 2, slots, kv_heads, head_dim]` to slots `targets`."""
    for layers in pool.split(layers_a_pass):
        moved = layers.index_select(2, sources)             # [layers, 2, rows, kv_heads, head_dim]
        if turn is not None:
            cos, sin = turn
            keys = moved[:, 0]
            first, second = keys.float().chunk(2, dim=-1)
            keys.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        layers.index_copy_(2, targets, moved)
