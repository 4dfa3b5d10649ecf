"""Matrix products whose weights are allocated but never initialised, for a loader fills every one of them."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`x @ weight.T + bias` for x `[..., in_features]`; weight `[out_features, in_features]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of one input as one matrix, rows in the order of `parts` (name in a checkpoint -> rows)."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts

    def forward_parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections one by one: views `[..., rows]` of the one product, not contiguous."""
        return self(x).split(tuple(self.parts.values()), dim=-1)
