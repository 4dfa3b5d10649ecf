"""What every attention engine promises: paged causal attention of spans with GQA, and segments without a mask."""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SpanBatch:
    """The spans of one step as attention kernels take them: row `i` is one span, several may belong to one sequence.

    The lengths are kept on the host as well (`q_lens`, `k_lens`), so that no backend has to synchronise to learn them.
    """

    cu_seqlens_q: Tensor        # int32 [spans + 1] where each span's queries start, and their total at the end
    seqlens_k: Tensor           # int32 [spans] KV range of each span: everything up to and with its last query
    block_tables: Tensor        # int32 [spans, width] columns behind a span's KV hold any valid block id
    slot_mapping: Tensor        # int64 [tokens] block * block_size + offset of each query's own KV; -1 writes nowhere
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    max_seqlen_q: int
    max_seqlen_k: int


class AttentionBackend(ABC):
    """One attention engine; it holds no state of a step, so one instance serves every layer of a model."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v `[tokens, kv_heads, head_dim]` into the caches `[blocks, block_size, kv_heads, head_dim]`.

        Token `i` goes to slot `slot_mapping[i]` (int64, counted over blocks); a slot of -1 is skipped.
        """

    @abstractmethod
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """Attention of q `[tokens, heads, dim]` over the caches `[blocks, block_size, kv_heads, dim]`; same shape as q.

        Causal, aligned at the end of the KV range: query `i` of a span of `m` sees the keys before `k_len - m + i + 1`.
        What lies behind a span's KV range is never read, so it may hold anything, NaN included.
        """

    @abstractmethod
    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """Attention without a mask inside each segment of q, k, v `[tokens, heads, dim]`; same shape as q.

        `cu_seqlens` (int32 `[segments + 1]`) and `seqlens` (the same lengths on the host) tile the tokens.
        """
