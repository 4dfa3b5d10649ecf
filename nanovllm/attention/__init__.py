"""Attention behind one contract: the caller names a backend, models see only the contract."""
from __future__ import annotations

import torch

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.torch_backend import TorchBackend

__all__ = ["AttentionBackend", "SpanBatch", "select_backend"]

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchBackend}
FASTEST = {"cuda": "torch", "cpu": "torch"}     # device type -> what "auto" means there


def select_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest one on `device`.

    Raises ValueError for a name or a type of device that is not known.
    """
    device_type = torch.device(device).type
    if device_type not in FASTEST:
        raise ValueError(f"no attention backend runs on device {str(device)!r}; use one of {sorted(FASTEST)}")
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend {name!r} is not known; use one of {['auto', *sorted(BACKENDS)]}")
    return BACKENDS[FASTEST[device_type] if name == "auto" else name]()
