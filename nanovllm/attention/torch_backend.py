"""Attention in plain torch: the truth for every other backend, and the engine of the CPU."""
from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.kernels.kv_store import store_kv as store_kv_triton

# Up to so many cached values (spans * keys * kv_heads * head_dim) one padded call beats a call per span on the CPU:
# launches cost more than the copy. Measured with 2 cores; beyond it the copy's memory traffic loses by up to 10x.
PADDED_VALUES_ON_CPU = 1 << 17


class TorchBackend(AttentionBackend):
    """scaled_dot_product_attention over KV gathered from its blocks; any dtype, head size and device."""

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.store_kv`."""
        store = store_kv_triton if k.is_cuda else store_kv_torch
        store(k, v, k_cache, v_cache, slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; neighbours of one query each (a decode batch) share a call."""
        outputs = []
        row = first = 0
        for single, run in groupby(spans.q_lens, key=lambda q_len: q_len == 1):
            q_lens = tuple(run)
            these = slice(first, first + len(q_lens))
            tables, k_lens, rows = spans.block_tables[these], spans.k_lens[these], q[row : row + sum(q_lens)]
            padded_values = len(q_lens) * max(k_lens) * k_cache.stride(1)
            if single and (q.is_cuda or padded_values <= PADDED_VALUES_ON_CPU):
                seqlens_k = spans.seqlens_k[these]
                outputs.append(_attend_one_query_each(rows, k_cache, v_cache, tables, seqlens_k, max(k_lens), scale))
            else:
                outputs += _attend_one_by_one(rows, k_cache, v_cache, tables, q_lens, k_lens, scale)
            row, first = row + sum(q_lens), these.stop
        return torch.cat(outputs)

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """See `AttentionBackend.encode`; neighbours of one length share a call."""
        outputs = []
        first = 0
        for seqlen, run in groupby(seqlens):
            count = len(list(run))
            stop = first + count * seqlen
            # [segments, heads, seqlen, dim]
            q_run, k_run, v_run = (x[first:stop].unflatten(0, (count, seqlen)).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q_run, k_run, v_run, scale=scale)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
            first = stop
        return torch.cat(outputs)


def store_kv_torch(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Twin of `kernels.kv_store.store_kv`; on a CUDA device the check for -1 would synchronise."""
    if bool((slot_mapping < 0).any()):
        written = slot_mapping >= 0
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def _attend_one_by_one(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, q_lens: tuple[int, ...],
    k_lens: tuple[int, ...], scale: float
) -> list[Tensor]:
    """The outputs `[q_len, heads, dim]` of each span, one call a span."""
    block_size = k_cache.shape[1]
    outputs = []
    for queries, k_len, table in zip(q.split(q_lens), k_lens, block_tables):
        blocks = table[: -(-k_len // block_size)]
        k, v = (_rows_of_blocks(cache, blocks)[:k_len] for cache in (k_cache, v_cache))
        outputs.append(_attend_one_span(queries, k, v, scale))
    return outputs


def _rows_of_blocks(cache: Tensor, block_table: Tensor) -> Tensor:
    """KV `[len(block_table) * block_size, kv_heads, dim]`; on the CPU without a copy if the blocks are a run."""
    if not cache.is_cuda:
        blocks = block_table.tolist()
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            return cache[blocks[0] : blocks[0] + len(blocks)].flatten(0, 1)
    return cache.index_select(0, block_table).flatten(0, 1)


def _attend_one_span(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q `[queries, heads, dim]` over k, v `[keys, kv_heads, dim]`, the last query seeing the last key."""
    (queries, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads
    if queries == 1:
        # The heads of a group become queries of one KV head, which is then read once: [1, kv_heads, group, dim].
        one, k, v = q.view(1, kv_heads, group, dim), k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(one, k, v, scale=scale).reshape(1, heads, dim)
    # KV heads become the batch and are repeated by stride alone: [kv_heads, group, queries or keys, dim].
    grouped = q.view(queries, kv_heads, group, dim).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    whole = queries == keys
    mask = None if whole else torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=whole, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(queries, heads, dim)


def _attend_one_query_each(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, k_lens: Tensor, padded_len: int, scale: float
) -> Tensor:
    """q `[spans, heads, dim]` over the KV of all spans, padded to the longest: one call, nothing read on the host."""
    (num_spans, heads, dim), (block_size, kv_heads) = q.shape, k_cache.shape[1:3]
    place = torch.arange(padded_len, device=q.device)
    # Padding repeats the last key: what lies behind it may be NaN, which no mask takes out of a weighted sum.
    filled = torch.minimum(place, k_lens.long()[:, None] - 1)       # [spans, padded_len]
    slots = block_tables.long().gather(1, filled // block_size) * block_size + filled % block_size
    k, v = (cache.flatten(0, 1).index_select(0, slots.flatten()).view(num_spans, -1, kv_heads, dim).transpose(1, 2)
            for cache in (k_cache, v_cache))                        # [spans, kv_heads, padded_len, dim]
    grouped = q.view(num_spans, kv_heads, heads // kv_heads, dim)
    mask = (place < k_lens[:, None])[:, None, None]
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(num_spans, heads, dim)
