"""For each shape of work the engine that was measured fastest: FlashAttention for long spans, Triton for short ones."""
from __future__ import annotations

from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.flash import FlashBackend
from nanovllm.attention.fused import TritonOps
from nanovllm.attention.triton_backend import TritonBackend

SHORT_SEGMENT = 64      # patches of a vision window: 112 x 112 pixels


class FastestBackend(AttentionBackend):
    """Decode batches and vision windows go to Triton (docs/log.md has both times), all else to FlashAttention."""

    fused = TritonOps()

    def __init__(self, flash: FlashBackend, triton: TritonBackend) -> None:
        self.flash, self.triton = flash, triton

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.store_kv`."""
        self.triton.store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `AttentionBackend.attend`."""
        backend = self.triton if spans.max_seqlen_q == 1 else self.flash
        return backend.attend(q, k_cache, v_cache, spans, scale)

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """See `AttentionBackend.encode`."""
        backend = self.triton if max(seqlens, default=0) <= SHORT_SEGMENT else self.flash
        return backend.encode(q, k, v, cu_seqlens, seqlens, scale)
