"""RMSNorm with float32 sums, rounded where transformers rounds."""
from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis; the quotient is rounded to x's dtype before weight multiplies it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual): a block's output joins the residual stream the next one reads."""
        residual = x if residual is None else x + residual
        return self(residual), residual
