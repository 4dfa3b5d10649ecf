"""Rotary positions: their angles; turns in place, or in one pass from merged projections to queries and the cache."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import await_inputs, early_launch, starts_early

ROWS = 16       # heads of tokens that one program turns
ANGLES = 256    # that one program works out


@triton.jit(do_not_specialize=["tokens", "axis_stride", "attention_factor"])
def _rotation_kernel(
    positions: tl.tensor, inv_freq: tl.tensor, axis_of_pair: tl.tensor, cos: tl.tensor, sin: tl.tensor, tokens: int,
    axis_stride: int, attention_factor: float, HALF: tl.constexpr, ANGLES: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    await_inputs(EARLY)
    place = tl.program_id(0).to(tl.int64) * ANGLES + tl.arange(0, ANGLES)
    token, pair = place // HALF, place % HALF
    mask = token < tokens
    position = tl.load(positions + tl.load(axis_of_pair + pair) * axis_stride + token, mask=mask, other=0)
    angle = position.to(tl.float32) * tl.load(inv_freq + pair)
    tl.store(cos + place, tl.cos(angle) * attention_factor, mask=mask)
    tl.store(sin + place, tl.sin(angle) * attention_factor, mask=mask)


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


@triton.jit
def _norm(first: tl.tensor, second: tl.tensor, weight: tl.tensor, mask: tl.tensor, eps: float, HALF: tl.constexpr,
          ) -> tuple[tl.tensor, tl.tensor]:
    """RMSNorm of heads given as two halves; float32, rounded where the twin rounds: before the weight and behind it."""
    wide, wide_too = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(wide * wide, 1) + tl.sum(wide_too * wide_too, 1)) / (2 * HALF) + eps)[:, None]
    gain = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    gain_too = tl.load(weight + HALF, mask=mask, other=0.0).to(tl.float32)
    normed = ((wide * scale).to(first.dtype).to(tl.float32) * gain).to(first.dtype).to(tl.float32)
    return normed, ((wide_too * scale).to(first.dtype).to(tl.float32) * gain_too).to(first.dtype).to(tl.float32)


@triton.jit
def _finite(x: tl.tensor) -> tl.tensor:
    """x with 0 in place of what is not finite, see kernels.kv_store."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _store_halves(place: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> None:
    tl.store(place, first, mask=mask)
    tl.store(place + HALF, second, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _project_kernel(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, eps: float,
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slot_mapping: tl.tensor, rows: int, qkv_stride: int,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """A row is a head of a token: of a query, a key or a value, in this order."""
    await_inputs(EARLY)
    row, pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, head = row // (HEADS + 2 * KV_HEADS), row % (HEADS + 2 * KV_HEADS)
    of_query, of_value = head < HEADS, head >= HEADS + KV_HEADS
    mask = (row < rows)[:, None] & (pair < HALF)[None, :]
    place = qkv + (token.to(tl.int64) * qkv_stride + head * (2 * HALF))[:, None] + pair[None, :]
    given, given_too = tl.load(place, mask=mask, other=0.0), tl.load(place + HALF, mask=mask, other=0.0)
    first, second = given.to(tl.float32), given_too.to(tl.float32)
    if NORM:
        weight = tl.where(of_query, q_weight, k_weight)[:, None] + pair[None, :]
        first, second = _norm(given, given_too, weight, mask, eps, HALF)
    first, second = _turn(first, second, token, cos, sin, pair, mask, HALF)
    first, second = first.to(given.dtype), second.to(given.dtype)

    q_row = (token.to(tl.int64) * HEADS + head) * (2 * HALF)
    _store_halves(q + q_row[:, None] + pair[None, :], first, second, mask & of_query[:, None], HALF)
    slot = tl.load(slot_mapping + token, mask=row < rows, other=-1)     # int64: slot * size passes 2^31
    of_key, stored = ~(of_query | of_value), mask & (slot >= 0)[:, None]
    k_row = (slot * KV_HEADS + head - HEADS) * (2 * HALF)
    _store_halves(k_cache + k_row[:, None] + pair[None, :], first, second, stored & of_key[:, None], HALF)
    v_row = k_row - KV_HEADS * (2 * HALF)
    _store_halves(v_cache + v_row[:, None] + pair[None, :], _finite(given), _finite(given_too),
                  stored & of_value[:, None], HALF)


def rotation(positions: Tensor, inv_freq: Tensor, axis_of_pair: Tensor, attention_factor: float,
             ) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[tokens, pairs]`, times `attention_factor`, of positions int64 `[axes, tokens]`.

    Pair `i` turns by `inv_freq[i]` (float32) a position of axis `axis_of_pair[i]` (int64). Equal in plain torch:
    `layers.rotary.RotaryEmbedding`.
    """
    tokens, half = positions.shape[1], len(inv_freq)
    assert positions.stride(1) == 1
    cos, sin = (torch.empty(tokens, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    if tokens:
        early = starts_early(positions)
        _rotation_kernel[(triton.cdiv(tokens * half, ANGLES),)](
            positions, inv_freq, axis_of_pair, cos, sin, tokens, positions.stride(0), attention_factor, HALF=half,
            ANGLES=ANGLES, EARLY=early, num_warps=4, **early_launch(early))
    return cos, sin


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
    `[blocks, block_size, kv_heads, head_dim]`, as `kernels.kv_store.store_kv` says. Equal in plain torch:
    `layers.attention`.
    """
    (tokens, all_heads, head_dim), kv_heads = qkv.shape, k_cache.shape[2]
    assert qkv.stride()[1:] == (head_dim, 1) and cos.is_contiguous() and sin.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    if tokens:
        early = starts_early(qkv)
        _project_kernel[(triton.cdiv(tokens * all_heads, ROWS),)](
            qkv, cos, sin, q_weight, k_weight, eps, q, k_cache, v_cache, slot_mapping, tokens * all_heads,
            qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
            WIDTH=triton.next_power_of_2(head_dim // 2), NORM=norms is not None, ROWS=ROWS, EARLY=early,
            num_warps=4, **early_launch(early))
    return q
