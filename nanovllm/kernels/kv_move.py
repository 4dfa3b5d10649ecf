"""Moves the keys and values of tokens to other slots of the pool, all layers and both caches in one launch."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32       # (token, KV head) pairs that one program moves


@triton.jit(do_not_specialize=["rows", "slots"])
def _move_kv_kernel(
    pool: tl.tensor, sources: tl.tensor, targets: tl.tensor, first_rows: tl.tensor, cos: tl.tensor, sin: tl.tensor,
    rows: int, slots: int, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TURN: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    layer = tl.program_id(1).to(tl.int64)       # layer * slots * size passes 2^31
    part, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row, head = part // KV_HEADS, part % KV_HEADS
    moved = (row < rows) & (row >= tl.load(first_rows + layer))
    source, target = tl.load(sources + row, mask=moved, other=0), tl.load(targets + row, mask=moved, other=0)
    from_row = ((source * KV_HEADS + head) * (2 * HALF))[:, None] + pair[None, :]
    to_row = ((target * KV_HEADS + head) * (2 * HALF))[:, None] + pair[None, :]
    mask = moved[:, None] & (pair < HALF)[None, :]
    keys = pool + layer * 2 * slots * (KV_HEADS * 2 * HALF)
    values = pool + (layer * 2 + 1) * slots * (KV_HEADS * 2 * HALF)
    first = tl.load(keys + from_row, mask=mask, other=0.0)
    second = tl.load(keys + from_row + HALF, mask=mask, other=0.0)
    value = tl.load(values + from_row, mask=mask, other=0.0)
    value_too = tl.load(values + from_row + HALF, mask=mask, other=0.0)
    if TURN:
        c = tl.load(cos + pair, mask=pair < HALF, other=0.0)[None, :]
        s = tl.load(sin + pair, mask=pair < HALF, other=0.0)[None, :]
        wide, wide_too = first.to(tl.float32), second.to(tl.float32)
        first, second = (wide * c - wide_too * s).to(first.dtype), (wide_too * c + wide * s).to(first.dtype)
    tl.store(keys + to_row, first, mask=mask)
    tl.store(keys + to_row + HALF, second, mask=mask)
    tl.store(values + to_row, value, mask=mask)
    tl.store(values + to_row + HALF, value_too, mask=mask)


def move_kv(
    pool: Tensor, sources: Tensor, targets: Tensor, first_rows: Tensor, turn: tuple[Tensor, Tensor] | None
) -> None:
    """Slots `sources` of the contiguous pool `[layers, 2, slots, kv_heads, head_dim]` to `targets`, both int64 `[n]`.

    Keys are turned by one angle a pair (`turn`: cos and sin, float32 `[head_dim / 2]`; None: not at all) in float32 and
    rounded once. In layer `l` the rows before `first_rows[l]` (`[layers]`) stay. No slot may be source and target.
    Equal in plain torch: `runner.kv_cache.move_kv`.
    """
    num_layers, _, slots, kv_heads, head_dim = pool.shape
    assert pool.is_contiguous()
    cos, sin = turn if turn is not None else (first_rows, first_rows)
    if rows := len(sources):
        _move_kv_kernel[(triton.cdiv(rows * kv_heads, ROWS), num_layers)](
            pool, sources, targets, first_rows, cos, sin, rows, slots, KV_HEADS=kv_heads, HALF=head_dim // 2,
            WIDTH=triton.next_power_of_2(head_dim // 2), TURN=turn is not None, ROWS=ROWS, num_warps=4)
