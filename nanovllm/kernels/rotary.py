"""Rotary positions: alone in place, or as one pass from merged projections to queries and the paged cache."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16       # heads of tokens that one program turns


@triton.jit
def _turn(first: tl.tensor, second: tl.tensor, token: tl.tensor, cos: tl.tensor, sin: tl.tensor, pair: tl.tensor,
          mask: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Pairs (first, second), float32 [rows, pairs], turned by the angles of their tokens."""
    angle = (token * HALF)[:, None] + pair[None, :]
    c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    return first * c - second * s, second * c + first * s


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, rows: int, x_stride: int, x_head_stride: int,
    HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
) -> None:
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = row // HEADS, row % HEADS
    mask = (row < rows)[:, None] & (pair < HALF)[None, :]
    place = x + (token.to(tl.int64) * x_stride + head * x_head_stride)[:, None] + pair[None, :]
    first, second = tl.load(place, mask=mask, other=0.0), tl.load(place + HALF, mask=mask, other=0.0)
    turned = _turn(first.to(tl.float32), second.to(tl.float32), token, cos, sin, pair, mask, HALF)
    tl.store(place, turned[0].to(first.dtype), mask=mask)
    tl.store(place + HALF, turned[1].to(first.dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _project_kernel(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, eps: float,
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slot_mapping: tl.tensor, rows: int, qkv_stride: int,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A row is a head of a token: of a query, a key or a value, in this order."""
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = row // (HEADS + 2 * KV_HEADS), row % (HEADS + 2 * KV_HEADS)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (pair < HALF)[None, :]
    mask = (row < rows)[:, None] & inside
    place = qkv + (token.to(tl.int64) * qkv_stride + head * (2 * HALF))[:, None] + pair[None, :]
    given, given_too = tl.load(place, mask=mask, other=0.0), tl.load(place + HALF, mask=mask, other=0.0)
    first, second = given.to(tl.float32), given_too.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        weight = tl.where(is_query, q_weight, k_weight)[:, None] + pair[None, :]
        gain, gain_too = tl.load(weight, mask=mask, other=0.0), tl.load(weight + HALF, mask=mask, other=0.0)
        # rounded where the twin rounds: once before the weight, once behind it
        first = ((first * scale).to(given.dtype).to(tl.float32) * gain.to(tl.float32)).to(given.dtype).to(tl.float32)
        second = (second * scale).to(given.dtype).to(tl.float32) * gain_too.to(tl.float32)
        second = second.to(given.dtype).to(tl.float32)
    first, second = _turn(first, second, token, cos, sin, pair, mask, HALF)
    turned = tl.where(is_value[:, None], given, first.to(given.dtype))
    turned_too = tl.where(is_value[:, None], given_too, second.to(given.dtype))

    slot = tl.load(slot_mapping + token, mask=row < rows, other=-1)     # int64: slot * size passes 2^31
    q_place = q + ((token.to(tl.int64) * HEADS + head) * (2 * HALF))[:, None] + pair[None, :]
    of_query = mask & is_query[:, None]
    tl.store(q_place, turned, mask=of_query)
    tl.store(q_place + HALF, turned_too, mask=of_query)
    k_place = k_cache + ((slot * KV_HEADS + head - HEADS) * (2 * HALF))[:, None] + pair[None, :]
    of_key = mask & ((slot >= 0) & (head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    tl.store(k_place, turned, mask=of_key)
    tl.store(k_place + HALF, turned_too, mask=of_key)
    v_place = v_cache + ((slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF))[:, None] + pair[None, :]
    of_value = mask & ((slot >= 0) & is_value)[:, None]
    tl.store(v_place, turned, mask=of_value)
    tl.store(v_place + HALF, turned_too, mask=of_value)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns x `[tokens, heads, head_dim]` in place: pair `(i, i + head_dim / 2)` of token `n` by its angle `[n, i]`.

    cos, sin: float32 `[tokens, head_dim / 2]`. In float32, rounded once. Equal in plain torch: `layers.rotary`.
    """
    tokens, heads, head_dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    if tokens:
        _rotate_kernel[(triton.cdiv(tokens * heads, ROWS),)](
            x, cos, sin, tokens * heads, x.stride(0), x.stride(1), HEADS=heads, HALF=head_dim // 2,
            WIDTH=triton.next_power_of_2(head_dim // 2), ROWS=ROWS, num_warps=4)


def norm_rotate_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor, float] | None,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
) -> Tensor:
    """Queries `[tokens, heads, head_dim]` of merged projections qkv `[tokens, heads + 2 * kv_heads, head_dim]`.

    Queries and keys are normed per head if `norms` gives their weights `[head_dim]` and the epsilon, and turned by cos
    and sin (float32 `[tokens, head_dim / 2]`). Keys and values go to row `slot_mapping[i]` of the contiguous caches
    `[blocks, block_size, kv_heads, head_dim]`; -1 writes nothing. Equal in plain torch: `layers.attention`.
    """
    (tokens, all_heads, head_dim), kv_heads = qkv.shape, k_cache.shape[2]
    assert qkv.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    if tokens:
        _project_kernel[(triton.cdiv(tokens * all_heads, ROWS),)](
            qkv, cos, sin, q_weight, k_weight, eps, q, k_cache, v_cache, slot_mapping, tokens * all_heads,
            qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
            WIDTH=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, ROWS=ROWS, num_warps=4)
    return q
