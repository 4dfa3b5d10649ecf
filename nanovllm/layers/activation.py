"""The gated feed-forward block of text and vision layers."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention.contract import FusedOps
from nanovllm.layers.linear import MergedLinear, RowLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.parallel import ALONE, TensorParallel


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, element by element; all `[..., intermediate_size]`."""
    return F.silu(gate) * up


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` for x `[tokens, hidden_size]`, gate and up being one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False,
                 fused: FusedOps | None = None, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.fused = fused
        parts = dict.fromkeys(("gate_proj", "up_proj"), parallel.split(intermediate_size))
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias, fused)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias, fused, parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self.gate_up_proj(x))

    def forward_normed(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(`forward` of the norm of x + residual, x + residual)."""
        projections, residual = self.gate_up_proj.forward_normed(norm, x, residual)
        return self._down(projections), residual

    def _down(self, projections: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.split(projections)
        if self.fused is None:
            return self.down_proj(silu_and_mul(gate, up))
        if (fused := self.down_proj.fused_for(gate, plain=False)) is not None:
            return self.down_proj.forward_gated(fused, gate, up)
        x = self.fused.silu_and_mul(gate, up)
        return self.down_proj(x) if self.down_proj.fused_for(x) is not None else self.down_proj.forward_padded(x)
