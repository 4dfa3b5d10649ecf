"""Matrix products whose weights are allocated but never initialised, for a loader fills every one of them."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention.contract import FusedOps


class Linear(nn.Module):
    """`x @ weight.T + bias` for x `[..., in_features]`; weight `[out_features, in_features]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, fused: FusedOps | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None and len(x) <= self.fused.max_linear_rows:
            return self.fused.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def forward_padded(self, x: Tensor) -> Tensor:
        """`forward` for x with zeros behind each row, as many as the rows of the weights are padded with (see
        `models.registry`): an odd width makes a library's product three times as slow as the next even one."""
        if x.stride(0) == x.shape[1] or x.stride(0) != self.weight.stride(0):
            return self(x)
        return F.linear(_with_padding(x), _with_padding(self.weight), self.bias)


def _with_padding(x: Tensor) -> Tensor:
    """The rows of a view together with what lies between them."""
    return x.as_strided((len(x), x.stride(0)), x.stride())


class MergedLinear(Linear):
    """Several projections of one input as one matrix, rows in the order of `parts` (name in a checkpoint -> rows)."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False,
                 fused: FusedOps | None = None) -> None:
        super().__init__(in_features, sum(parts.values()), bias, fused)
        self.parts = parts

    def forward_parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections one by one: views `[..., rows]` of the one product, not contiguous."""
        return self(x).split(tuple(self.parts.values()), dim=-1)
