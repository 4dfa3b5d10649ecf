"""Attention in our own Triton kernels: fast on any CUDA device with nothing else installed."""
from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.fused import TritonOps
from nanovllm.kernels.attention import Tiles, attend, num_tiles
from nanovllm.kernels.kv_store import store_kv

MAX_SPLITS = 16             # of one range of keys; adding the parts up costs more from there on
PROGRAMS_A_SM = 16          # of a launch that splits keys, most of which find that their range is too short
MAX_RANGES = 1 << 12        # of keys in such a launch
DECODES_WORTH_A_LAUNCH = 4  # one-query spans before the others that get a launch of their own


class TritonBackend(AttentionBackend):
    """Paged attention that splits long key ranges over idle multiprocessors; float32, too, at a slower pace."""

    fused = TritonOps()

    def __init__(self, device: torch.device) -> None:
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self.arrivals = torch.zeros(MAX_RANGES, dtype=torch.int32, device=device)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.store_kv`."""
        store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spans: SpanBatch, scale: float) -> Tensor:
        """See `AttentionBackend.attend`; a run of decodes before longer spans has a launch of its own."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = len(spans.q_lens)
        if spans.max_seqlen_q > 1:
            decodes = sum(1 for _ in takewhile(lambda q_len: q_len == 1, spans.q_lens))
            decodes = decodes if decodes >= DECODES_WORTH_A_LAUNCH else 0
        group, kv_heads = q.shape[1] // k_cache.shape[2], k_cache.shape[2]
        for first, stop, longest in ((0, decodes, 1), (decodes, len(spans.q_lens), spans.max_seqlen_q)):
            if first < stop:
                # Token `first` begins span `first`: what stands before it are decodes. A launch sees its own rows only.
                rows = slice(0, decodes) if longest == 1 else slice(first, None)
                cu_seqlens_q = spans.cu_seqlens_q[first:stop + 1] - first if first else spans.cu_seqlens_q[:stop + 1]
                one_query, q_rows = longest == 1, q[rows]
                tiles = paged_tiles(q, k_cache.shape[1], longest * group)
                ranges = num_tiles(len(q_rows), stop - first, q.shape[1], kv_heads, tiles, one_query)
                tiles = self._split(tiles, ranges, spans.max_seqlen_k)
                attend(q_rows, k_cache, v_cache, out[rows], cu_seqlens_q, scale, tiles,
                       spans.seqlens_k[first:stop], spans.block_tables[first:stop], one_query, self.arrivals)
        return out

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, seqlens: tuple[int, ...], scale: float
    ) -> Tensor:
        """See `AttentionBackend.encode`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend(q, k, v, out, cu_seqlens, scale, segment_tiles(q, max(seqlens, default=1)))
        return out

    def _split(self, tiles: Tiles, ranges: int, max_seqlen_k: int) -> Tiles:
        """`tiles` with as many splits as the device has room for, rounded down to a power of two.

        How many of them have work, each range says on the device: lengths differ, and the longest would be waited for.
        """
        wanted = min(PROGRAMS_A_SM * self.num_sms // ranges, max_seqlen_k // (tiles.least * tiles.keys), MAX_SPLITS)
        splits = 1 << max(wanted, 1).bit_length() - 1 if ranges <= MAX_RANGES else 1
        return replace(tiles, splits=splits)


def paged_tiles(q: Tensor, block_size: int, rows: int) -> Tiles:
    """Tiles for spans of at most `rows` (token, head of a KV head) pairs; measured on an H200, see docs/log.md."""
    keys = min(64, block_size & -block_size)        # the largest power of two that divides the block size
    if q.dtype == torch.float32:
        return Tiles(16, min(keys, 32), 4, 2)
    if rows <= 16:
        return Tiles(16, keys, 4, 3)
    if rows <= 64:
        return Tiles(64, keys, 4, 3)
    return Tiles(128, keys, 8, 3)


def segment_tiles(q: Tensor, max_seqlen: int) -> Tiles:
    """Tiles for segments of at most `max_seqlen` tokens; measured on an H200, see docs/log.md."""
    if q.dtype == torch.float32:
        return Tiles(16, 32, 4, 2)
    if max_seqlen <= 64:
        return Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 4 if q.shape[2] <= 80 else 8, 3)
