"""RMSNorm of rows, alone or of a sum with the residual stream, in one pass over memory."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import await_inputs, early_launch, starts_early


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, total: tl.tensor,
    x_stride: int, residual_stride: int, eps: float, SIZE: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    await_inputs(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = place < SIZE
    value = tl.load(x + row * x_stride + place, mask=mask, other=0.0)
    if ADD:
        other = tl.load(residual + row * residual_stride + place, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + row * SIZE + place, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)      # rounded where the twin rounds
    gain = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + place, (normed * gain).to(value.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` of x `[rows, size]`, whose rows are contiguous. Equal in plain torch: `layers.norm`."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual), all `[rows, size]`. Equal in plain torch: `layers.norm`."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    (rows, size), other = x.shape, x if residual is None else residual
    assert x.stride(1) == other.stride(1) == weight.stride(0) == 1
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if residual is not None else x
    width = triton.next_power_of_2(size)
    if rows:
        early = starts_early(x)
        _rms_norm_kernel[(rows,)](
            x, other, weight, out, total, x.stride(0), other.stride(0), eps, SIZE=size, WIDTH=width,
            ADD=residual is not None, EARLY=early, num_warps=min(max(width // 512, 1), 8), **early_launch(early))
    return out, total
