"""Qwen2.5-VL: the shared decoder with biased projections and M-RoPE, beside the vision tower."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.qwen2_5_vision import VisionTower
from nanovllm.parallel import ALONE, TensorParallel


class Qwen2_5_VLForConditionalGeneration(CausalLM):
    """The decoder, with `encode_images` for the rows that take the place of image and video placeholders."""

    # the naming of transformers 4.52 and later, mapped to the earlier one that most checkpoints have
    checkpoint_prefixes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.visual.", "visual."), ("model.language_model.", "model."))

    def __init__(self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel = ALONE) -> None:
        super().__init__(config, backend, parallel)
        assert config.vision is not None, "a Qwen2.5-VL config has a vision part"
        self.patch_dim = config.vision.patch_dim
        self.visual = VisionTower(config.vision, backend, parallel.vision)

    @property
    def pixel_dtype(self) -> torch.dtype:
        """What the tower casts patches to."""
        return self.visual.compute_dtype(self.model.embed_tokens.weight.dtype)

    def encode_images(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Rows `[sum of t * h * w / merge^2, hidden]` of images and videos, in the order of their placeholders.

        patches: `[sum of t * h * w, patch_dim]`, any float dtype; grids: (t, h, w) in patches. The tower computes in
        its own dtype (see `VisionTower.compute_dtype`); the rows have the decoder's.
        """
        return self.visual(patches, grids).to(self.model.embed_tokens.weight.dtype)
