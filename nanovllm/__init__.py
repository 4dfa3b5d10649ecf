"""nanovllm runs Qwen3 and Qwen2.5-VL models and reuses the KV cache of images that come back."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM on first use: the words of the package stay importable without torch."""
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
