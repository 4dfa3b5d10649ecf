"""What every attention engine promises: paged causal attention of spans with GQA, and segments without a mask."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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


class FusedOps(ABC):
    """What layers do beside attention, each in one pass over memory; every kernel names its twin in plain torch."""

    @staticmethod
    @abstractmethod
    def compile_ahead(work: Callable[[], object]) -> int:
        """Compiles what `work` launches, and leaves out what is new of it: its results are worth nothing."""

    @staticmethod
    @abstractmethod
    def embed(token_ids: Tensor, fed: Tensor, last_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight `[vocab, size]` for the ids `last_ids[fed]`, or `token_ids` where fed is -1."""

    @staticmethod
    @abstractmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The norm of the rows of x `[rows, size]`."""

    @staticmethod
    @abstractmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), all `[rows, size]`."""

    @staticmethod
    @abstractmethod
    def beats_library(rows: int, weight: Tensor, plain: bool) -> bool:
        """Whether `linear` (plain), or else the two products behind it, is faster than the library's product."""

    @staticmethod
    @abstractmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` of a few rows x `[rows, in_features]`."""

    @staticmethod
    @abstractmethod
    def norm_linear(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, weight: Tensor,
                    bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(`linear` of the norm of x + residual, x + residual); the norm's weights are gain `[in_features]`."""

    @staticmethod
    @abstractmethod
    def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of `silu(gate) * up`."""

    @staticmethod
    @abstractmethod
    def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, all `[rows, size]`."""

    @staticmethod
    @abstractmethod
    def rotation(positions: Tensor, inv_freq: Tensor, axis_of_pair: Tensor,
                 attention_factor: float) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `[tokens, pairs]`, of positions int64 `[axes, tokens]`."""

    @staticmethod
    @abstractmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turns x `[tokens, heads, head_dim]` in place by cos and sin, float32 `[tokens, head_dim / 2]`."""

    @staticmethod
    @abstractmethod
    def norm_rotate_store(qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor, float] | None,
                          k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        """Queries `[tokens, heads, head_dim]`, normed and turned; keys, likewise, and values go to the caches."""

    @staticmethod
    @abstractmethod
    def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
        """(largest value, its id) of each row of float32 logits `[n, vocab]`; NaN where a row holds one."""

    @staticmethod
    @abstractmethod
    def lowest_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """float32 `[n, 1]`: the smallest value of each row of scaled `[n, vocab]` that top-k and then top-p keep."""

    @staticmethod
    @abstractmethod
    def draw(logits: Tensor, largest: Tensor, temperature: Tensor, keys: Tensor, lowest: Tensor | None,
             log_min_p: Tensor | None) -> Tensor:
        """One id a row of logits `[n, vocab]` by Gumbel-max."""

    @staticmethod
    @abstractmethod
    def sample(logits: Tensor, temperature: Tensor, keys: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        """(ids; whether each row is finite) by the largest logit where `greedy` says so, else by Gumbel-max."""

    @staticmethod
    @abstractmethod
    def sum_ranks(x: Tensor, addresses: Tensor, counts: Tensor, rank: int, block_bytes: int) -> None:
        """x becomes the sum of all ranks' x, sent through buffers that all GPUs of a host have mapped."""

    @staticmethod
    @abstractmethod
    def move_kv(pool: Tensor, sources: Tensor, targets: Tensor, first_rows: Tensor,
                turn: tuple[Tensor, Tensor] | None) -> None:
        """Slots of pool `[layers, 2, slots, kv_heads, head_dim]` to other slots, keys turned by one angle a pair."""


class AttentionBackend(ABC):
    """One attention engine; it holds no state of a step, so one instance serves every layer of a model."""

    fused: FusedOps | None = None       # None: layers compute in plain torch

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write k, v `[tokens, kv_heads, head_dim]` into the caches `[blocks, block_size, kv_heads, head_dim]`.

        Token `i` goes to slot `slot_mapping[i]` (int64, counted over blocks); a slot of -1 is skipped. A value that is
        not finite may be stored as 0, so that it reaches no other sequence that comes to use its block.
        """

    @abstractmethod
    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """Attention of q `[tokens, heads, dim]` over the caches `[blocks, block_size, kv_heads, dim]`; same shape as q.

        Causal, aligned at the end of the KV range: query `i` of a span of `m` sees the keys before `k_len - m + i + 1`.
        What lies behind a span's KV range changes nothing, as long as the values there are finite.
        """

    @abstractmethod
    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """Attention without a mask inside each segment of q, k, v `[tokens, heads, dim]`; same shape as q.

        `cu_seqlens` (int32 `[segments + 1]`) and `seqlens` (the same lengths on the host) tile the tokens.
        """
