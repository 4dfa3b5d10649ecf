"""What a caller passes as token ids and `mm_inputs`, checked to the last placeholder."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.image.items import ImageItem

if TYPE_CHECKING:
    from nanovllm.model_config import ModelConfig


def check_token_ids(ids: Any, vocab_size: int) -> list[int]:
    raise NotImplementedError


def expand_placeholders(
    token_ids: Sequence[int], mm_inputs: Mapping[str, Any] | None, model_config: ModelConfig
) -> list[int]:
    raise NotImplementedError


def parse_mm_inputs(
    token_ids: Sequence[int], mm_inputs: Mapping[str, Any] | None, model_config: ModelConfig
) -> list[ImageItem]:
    raise NotImplementedError


def identify(items: Sequence[ImageItem], cache_salt: str | None = None) -> None:
    raise NotImplementedError
