"""From the name of an architecture to a model whose parameters are allocated once, in their final place and dtype."""
from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.contract import AttentionBackend
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.qwen2_5_vision import VisionTower
from nanovllm.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.parallel import ALONE, TensorParallel

ROW_BYTES = 16

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLForConditionalGeneration,
}


def build_model(
    config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, device: torch.device | str,
    parallel: TensorParallel = ALONE,
) -> CausalLM:
    """One rank's share of the model of `config` on `device`, parameters in `dtype` and uninitialised: fill them next.

    A vision tower has the dtype of `VisionTower.compute_dtype`. Raises ValueError for an unknown architecture.
    """
    if (architecture := ARCHITECTURES.get(config.architecture)) is None:
        raise ValueError(f"architecture {config.architecture!r} is not supported; use one of {sorted(ARCHITECTURES)}")
    with torch.device("meta"):
        model = architecture(config, backend, parallel)
    _materialise(model, dtype, torch.device(device))
    return model.eval()


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Gives every parameter of a model on the meta device its room, and moves the buffers, which keep their dtype."""
    if isinstance(module, VisionTower):
        dtype = module.compute_dtype(dtype)
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(_aligned_empty(parameter.shape, dtype, device), False))
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))
    for child in module.children():
        _materialise(child, dtype, device)


def _aligned_empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor whose rows begin at multiples of 16 bytes, zeros between them. Without it a GPU's matrix product of rows
    of 3,420 values, as the vision tower has them, takes three times as long (see `Linear.forward_padded`)."""
    if len(shape) != 2 or shape[1] * dtype.itemsize % ROW_BYTES == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    stride = -(-shape[1] * dtype.itemsize // ROW_BYTES) * ROW_BYTES // dtype.itemsize
    return torch.zeros(shape[0], stride, dtype=dtype, device=device)[:, :shape[1]]
