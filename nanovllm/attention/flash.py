"""Attention through the FlashAttention packages: version 3 on Hopper where it is installed, else version 2."""
from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.fused import TritonOps
from nanovllm.kernels.kv_store import store_kv


class FlashBackend(AttentionBackend):
    """What both versions share; they compute in float16 and bfloat16 only."""

    fused = TritonOps()
    table_argument: str             # what the version calls a block table
    varlen: Callable[..., Tensor]
    with_kvcache: Callable[..., Tensor]

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.store_kv`."""
        store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; a decode batch is regular, which spares a look at `cu_seqlens_q`."""
        if spans.max_seqlen_q > 1:
            return self.attend_spans(q, k_cache, v_cache, spans, scale)
        table = {self.table_argument: spans.block_tables}
        return self.with_kvcache(q.unsqueeze(1), k_cache, v_cache, cache_seqlens=spans.seqlens_k, softmax_scale=scale,
                                 causal=True, **table).squeeze(1)

    @abstractmethod
    def attend_spans(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """`attend` for spans of any length."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """See `AttentionBackend.encode`."""
        longest = max(seqlens, default=0)
        return self.varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale)


class FlashAttention3(FlashBackend):
    """The module `flash_attn_interface`; any block size. Raises ImportError where it is not installed."""

    table_argument = "page_table"

    def __init__(self) -> None:
        from flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def attend_spans(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `FlashBackend`."""
        return self.with_kvcache(q, k_cache, v_cache, cache_seqlens=spans.seqlens_k, page_table=spans.block_tables,
                                 cu_seqlens_q=spans.cu_seqlens_q, max_seqlen_q=spans.max_seqlen_q,
                                 softmax_scale=scale, causal=True)


class FlashAttention2(FlashBackend):
    """The package `flash_attn`; blocks of a multiple of 256. Raises ImportError where it is not installed."""

    table_argument = "block_table"

    def __init__(self) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen, self.with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

    def attend_spans(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `FlashBackend`; this version wants the lengths of the KV ranges as a running sum."""
        cu_seqlens_k = torch.zeros_like(spans.cu_seqlens_q)
        torch.cumsum(spans.seqlens_k, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        return self.varlen(q, k_cache, v_cache, spans.cu_seqlens_q, cu_seqlens_k, spans.max_seqlen_q,
                           spans.max_seqlen_k, softmax_scale=scale, causal=True, block_table=spans.block_tables)


def flash_backend(device: torch.device) -> FlashBackend | None:
    """The newest version that is installed and runs on `device`; None where there is none."""
    major, _ = torch.cuda.get_device_capability(device)
    for version, fits in ((FlashAttention3, major == 9), (FlashAttention2, major >= 8)):
        if fits:
            try:
                return version()
            except (ImportError, OSError):      # not installed, or built for another torch
                pass
    return None
