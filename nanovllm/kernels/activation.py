"""The gate of a feed-forward block, in one pass over memory."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import await_inputs, early_launch, starts_early

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, gate_stride: int, up_stride: int, out_stride: int,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    await_inputs(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    value = tl.load(gate + row * gate_stride + place, mask=mask, other=0.0)
    factor = tl.load(up + row * up_stride + place, mask=mask, other=0.0)
    wide = value.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(value.dtype).to(tl.float32)      # rounded where the twin rounds
    tl.store(out + row * out_stride + place, (silu * factor.to(tl.float32)).to(value.dtype), mask=place < out_stride)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, all `[rows, size]`, each row contiguous. Equal in plain torch: `layers.activation`."""
    rows, size = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    # Rows begin at multiples of 16 bytes, zeros between them: what the matrix product behind needs to be fast.
    stride = -(-size * gate.element_size() // 16) * 16 // gate.element_size()
    out = torch.empty(rows, stride, dtype=gate.dtype, device=gate.device)[:, :size]
    if rows:
        early = starts_early(gate)
        _silu_and_mul_kernel[(rows, triton.cdiv(stride, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), stride, SIZE=size, BLOCK=BLOCK, EARLY=early, num_warps=4,
            **early_launch(early))
    return out
