"""Attention in plain torch: the truth for every other backend, and the engine of the CPU."""
from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.kernels.kv_store import store_kv as store_kv_triton

# So many cached values (spans * longest KV * kv_heads * head_dim) at most are gathered for one padded call. On the CPU
# launches cost more than the copy only up to here (measured with 2 cores; beyond, the copy loses by up to 10x); on a
# GPU the limit bounds memory: K and V of 512 MiB each in bfloat16.
PADDED_VALUES_ON_CPU, PADDED_VALUES_ON_GPU = 1 << 17, 1 << 28


class TorchBackend(AttentionBackend):
    """scaled_dot_product_attention over KV gathered from its blocks; any dtype, head size and device."""

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.store_kv`."""
        store = store_kv_triton if k.is_cuda else store_kv_torch
        store(k, v, k_cache, v_cache, slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; neighbours of one query each (a decode batch) share a call."""
        block_size, row_size = k_cache.shape[1], k_cache.stride(1)
        limit = (PADDED_VALUES_ON_GPU if q.is_cuda else PADDED_VALUES_ON_CPU) // row_size
        groups = _groups(spans, limit)
        outputs = []
        for group, queries in zip(groups, q.split([sum(spans.q_lens[group]) for group in groups])):
            tables, k_lens = spans.block_tables[group], spans.k_lens[group]
            if len(k_lens) > 1:
                seqlens_k = spans.seqlens_k[group]
                out = _attend_one_query_each(queries, k_cache, v_cache, tables, seqlens_k, max(k_lens), scale)
            else:
                blocks = tables[0, : -(-k_lens[0] // block_size)]
                k, v = (_rows_of_blocks(cache, blocks)[: k_lens[0]] for cache in (k_cache, v_cache))
                out = _attend_one_span(queries, k, v, scale)
            outputs.append(out)
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


def _groups(spans: SpanBatch, limit: int) -> list[slice]:
    """Stretches of spans for one call each: single queries while their KV, padded, is `limit` rows; else one span."""
    groups = []
    first = longest = 0
    for span, (q_len, k_len) in enumerate(zip(spans.q_lens, spans.k_lens)):
        longest = max(longest, k_len)
        joins = q_len == 1 == spans.q_lens[first] and (span + 1 - first) * longest <= limit
        if not joins and span > first:
            groups.append(slice(first, span))
            first, longest = span, k_len
    return [*groups, slice(first, len(spans.q_lens))]


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
