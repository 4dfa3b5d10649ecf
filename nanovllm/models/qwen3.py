"""Qwen3 dense: the shared decoder with norms on queries and keys, one position axis, tied or untied head."""
from __future__ import annotations

from nanovllm.models.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Tensors are named as in the published checkpoints, and the sizes come from the config: nothing to add."""
