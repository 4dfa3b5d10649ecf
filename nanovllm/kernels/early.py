"""Programmatic dependent launch: a kernel's programs start while the kernel before them still runs."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def await_inputs(EARLY: tl.constexpr) -> None:
    """Lets the next kernel start its programs, and waits until the kernel before this one is done, whole.

    It stands ahead of all that a kernel reads or writes, save weights, which no kernel of a step changes: so what
    starts early is the launch, and never work on something that is not there yet (CUDA programming guide, programmatic
    dependent launch).
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def starts_early(x: Tensor) -> bool:
    """Whether a kernel on x's device can start before the one ahead of it is done: Hopper and newer."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9


def early_launch(early: bool) -> dict[str, bool]:
    """The option of a launch of a kernel that waits by itself."""
    return {"launch_pdl": True} if early else {}
