"""One piece of kernel work: its floor, who can do it, and what comes out."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.25e12, 700e12        # an H200: copy, and a large bf16 product
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
ROTATED_BYTES = 512 << 20
TOLERANCE = 1e-2            # |out - twin| / |twin|
Run = Callable[[int], Any]  # the work on input set i


@dataclass
class Case:
    """One piece of work: its floor, who can do it, and the float32 result."""

    name: str
    bytes: float                        # read once and written once, of one call
    flops: float
    sets: int                           # of inputs
    runs: dict[str, Run]                # returns the result, or the tensor that it changed
    expected: Callable[[], Tensor] | None      # for input set 0
    sweep: dict[str, Run] = field(default_factory=dict)
    eager: tuple[str, ...] = ("torch",)       # those a CUDA graph cannot hold

    @property
    def floor_ms(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND) * 1e3
