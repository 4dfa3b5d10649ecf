"""Attention behind one contract: the caller names a backend, models see only the contract."""
from __future__ import annotations

import torch

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.torch_backend import TorchBackend

__all__ = ["AttentionBackend", "SpanBatch", "select_backend"]

DEVICES = {"torch": ("cpu", "cuda"), "flash": ("cuda",), "triton": ("cuda",)}      # where each backend runs


def select_backend(
    name: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest one for `dtype` on `device`.

    On a CUDA device "auto" takes FlashAttention 3 or 2 where it is installed, with Triton for the shapes that it does
    faster, else Triton alone; on the CPU it takes torch.
    "flash" needs one of the packages. Raises ValueError for a name or a type of device that is not known, and for a
    backend that does not run there or in that dtype.
    """
    device = torch.device(device)
    if device.type not in DEVICES["torch"]:
        raise ValueError(f"no attention backend runs on device {str(device)!r}; use one of {list(DEVICES['torch'])}")
    if name not in ("auto", *DEVICES):
        raise ValueError(f"attention_backend {name!r} is not known; use one of {['auto', *sorted(DEVICES)]}")
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        return TorchBackend()
    if device.type not in DEVICES[name if name != "auto" else "triton"]:
        raise ValueError(f"attention_backend {name!r} does not run on device {str(device)!r}; use 'auto' or 'torch'")
    # Imported here, since neither package need be installed where nothing runs on a GPU.
    from nanovllm.attention.fastest import FastestBackend
    from nanovllm.attention.flash import flash_backend
    from nanovllm.attention.triton_backend import TritonBackend

    if name != "triton":
        flash = flash_backend(device) if dtype != torch.float32 else None
        if flash is not None:
            return flash if name == "flash" else FastestBackend(flash, TritonBackend(device))
        if name == "flash":
            raise ValueError(f"attention_backend 'flash' cannot be had for {dtype} on {device}: it computes in float16 "
                             "or bfloat16, and needs flash_attn_interface on a Hopper GPU or flash_attn on an Ampere "
                             "or newer one; install one of them or use 'triton'")
    return TritonBackend(device)
