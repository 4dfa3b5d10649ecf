"""RMSNorm with float32 sums, rounded where transformers rounds."""
from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm.attention.contract import FusedOps


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis; the quotient is rounded to x's dtype before weight multiplies it."""

    def __init__(self, size: int, eps: float, fused: FusedOps | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None and x.ndim == 2:
            return self.fused.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual): a block's output joins the residual stream the next one reads."""
        if residual is None:
            return self(x), x
        if self.fused is not None:
            return self.fused.add_rms_norm(x, residual, self.weight, self.eps)
        residual = x + residual
        return self(residual), residual
