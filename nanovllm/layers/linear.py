"""Matrix products, whole or split over ranks, whose weights no constructor fills, for a loader fills every one."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.attention.contract import FusedOps
from nanovllm.layers.norm import RMSNorm
from nanovllm.parallel import ALONE, Part, TensorParallel


class Linear(nn.Module):
    """`x @ weight.T + bias` for x `[..., in_features]`; weight `[out_features, in_features]`, whole on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, fused: FusedOps | None = None) -> None:
        super().__init__()
        self.fused = fused
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        if (fused := self.fused_for(x)) is not None:
            return fused.linear(x, self.weight, self.added_bias)
        return F.linear(x, self.weight, self.added_bias)

    def fused_for(self, x: Tensor, plain: bool = True) -> FusedOps | None:
        """Who multiplies rows as few as those of x, with a norm or gate before it unless plain; None: the library."""
        fused = self.fused
        return fused if fused is not None and fused.beats_library(len(x), self.weight, plain) else None

    def forward_padded(self, x: Tensor) -> Tensor:
        """The product of x with zeros behind each row, as many as the rows of the weights are padded with (see
        `models.registry`): an odd width makes a library's product three times as slow as the next even one."""
        if x.stride(0) == x.shape[1] or x.stride(0) != self.weight.stride(0):
            return F.linear(x, self.weight, self.added_bias)
        return F.linear(_with_padding(x), _with_padding(self.weight), self.added_bias)


def _with_padding(x: Tensor) -> Tensor:
    """The rows of a view together with what lies between them."""
    return x.as_strided((len(x), x.stride(0)), x.stride())


class ColumnLinear(Linear):
    """Each rank computes its `parts` of the outputs, one behind the other, of an input that all ranks have whole."""

    def __init__(self, in_features: int, parts: tuple[Part, ...], bias: bool = False) -> None:
        super().__init__(in_features, sum(part.size for part in parts), bias)
        self.parts = parts


class MergedLinear(Linear):
    """Several projections of one input as one matrix, this rank's rows of each in the order of `parts`, whose keys are
    their names in a checkpoint."""

    def __init__(self, in_features: int, parts: dict[str, Part], bias: bool = False,
                 fused: FusedOps | None = None) -> None:
        super().__init__(in_features, sum(part.size for part in parts.values()), bias, fused)
        self.parts = parts

    def forward_normed(self, norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the projections of the norm of x + residual, x + residual), see `RMSNorm.add_and_norm`."""
        if (fused := self.fused_for(x, plain=False)) is not None:
            return fused.norm_linear(x, residual, norm.weight, norm.eps, self.weight, self.added_bias)
        x, residual = norm.add_and_norm(x, residual)
        return self(x), residual

    def split(self, projections: Tensor) -> tuple[Tensor, ...]:
        """The projections one by one: views `[..., rows]` of the one product, not contiguous."""
        return projections.split([part.size for part in self.parts.values()], dim=-1)


class RowLinear(Linear):
    """Each rank multiplies its share of the inputs, and all get the sum: it takes what a column-split layer made."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False, fused: FusedOps | None = None,
                 parallel: TensorParallel = ALONE) -> None:
        self.part = parallel.split(in_features)
        super().__init__(self.part.size, out_features, bias, fused)
        self.parallel = parallel

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias if self.parallel.rank == 0 else None       # once in the sum

    def forward(self, x: Tensor) -> Tensor:
        """`[..., out_features]`, the same on every rank, of this rank's x `[..., in_features / ranks]`."""
        return self.parallel.sum(super().forward(x))

    def forward_padded(self, x: Tensor) -> Tensor:
        return self.parallel.sum(super().forward_padded(x))

    def forward_gated(self, fused: FusedOps, gate: Tensor, up: Tensor) -> Tensor:
        """`forward` of `silu(gate) * up`, of rows as few as `fused` is for."""
        return self.parallel.sum(fused.gated_linear(gate, up, self.weight, self.added_bias))
