"""Attention of spans over paged keys, or of segments over their own, in a launch that may split the keys."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import await_inputs, early_launch, starts_early

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Tiles:
    """How one launch cuts up its work."""

    rows: int           # (token, query head) pairs of one KV head that a program answers
    keys: int           # keys of one turn of its loop; must divide the block size of a paged cache
    warps: int
    stages: int         # turns of the loop whose loads are in flight
    splits: int = 1     # programs that may share one range of keys
    least: int = 4      # turns of the loop that each of them has at least: short ranges are shared by fewer programs


@triton.jit
def _load_tile(pointers: tl.tensor, rows: tl.tensor, dims: tl.tensor, limit: tl.constexpr,
               MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr) -> tl.tensor:
    """The tile at `pointers` [rows, dims]; what a mask leaves out is 0 and is not read."""
    if MASK_ROWS:
        tile = tl.load(pointers, mask=rows[:, None] & (dims < limit)[None, :], other=0.0)
    elif MASK_DIMS:
        tile = tl.load(pointers, mask=(dims < limit)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _fold_keys(
    acc: tl.tensor, acc_tail: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, q: tl.tensor, q_tail: tl.tensor,
    k: tl.tensor, v: tl.tensor, k_stride: int, v_stride: int, table: tl.tensor, first_key: tl.tensor, start: tl.tensor,
    stop: tl.tensor, visible: tl.tensor, k_len: tl.tensor, scale: float, DIM: tl.constexpr, MAIN: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Keys [start, stop) join the running softmax; a row sees the keys before `visible`. `scale` is in powers of 2."""
    key, dims, tail = tl.arange(0, KEYS), tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    block = first_key
    if BLOCK_SIZE:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < stop, other=0)
    for place in tl.range(start, stop, KEYS):
        if BLOCK_SIZE:      # a tile lies within one block; slot * stride passes 2^31 in a large cache
            slot = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
            # One turn ahead: a block loaded in the turn that needs it would halve the depth of the pipeline.
            block = tl.load(table + tl.minimum(place + KEYS, stop - 1) // BLOCK_SIZE)
        else:
            slot = (first_key + place).to(tl.int64)
        k_rows = k + slot * k_stride + (key * k_stride)[:, None]
        v_rows = v + slot * v_stride + (key * v_stride)[:, None]
        real = place + key < k_len
        keys = _load_tile(k_rows + dims[None, :], real, dims, DIM, MASKED, MAIN > DIM)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if DIM > MAIN:
            keys_tail = _load_tile(k_rows + tail[None, :], real, tail, DIM, MASKED, MAIN + TAIL > DIM)
            scores = tl.dot(q_tail, tl.trans(keys_tail), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where((place + key)[None, :] < visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        # A row that has seen no key yet has the maximum -inf, which must not meet itself in a difference.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.math.exp2(scores * scale - shift[:, None])
        decay = tl.math.exp2(row_max - shift)
        row_sum, row_max = row_sum * decay + tl.sum(weights, 1), new_max
        values = _load_tile(v_rows + dims[None, :], real, dims, DIM, MASKED, MAIN > DIM)
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * decay[:, None], input_precision="ieee")
        if DIM > MAIN:
            values_tail = _load_tile(v_rows + tail[None, :], real, tail, DIM, MASKED, MAIN + TAIL > DIM)
            acc_tail = tl.dot(weights, values_tail, acc_tail * decay[:, None], input_precision="ieee")
    return acc, acc_tail, row_max, row_sum


@triton.jit
def _walk_keys(
    q: tl.tensor, q_tail: tl.tensor, k: tl.tensor, v: tl.tensor, k_stride: int, v_stride: int, table: tl.tensor,
    first_key: tl.tensor, start: tl.tensor, unmasked: tl.tensor, stop: tl.tensor, visible: tl.tensor, k_len: tl.tensor,
    scale: float, ROWS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, ONE_QUERY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax over keys [start, stop), those before `unmasked` seen by every row."""
    acc, acc_tail = tl.zeros([ROWS, MAIN], tl.float32), tl.zeros([ROWS, TAIL], tl.float32)
    row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if not ONE_QUERY:       # a decode has so few tiles that a second loop would cost more than masks
        acc, acc_tail, row_max, row_sum = _fold_keys(
            acc, acc_tail, row_max, row_sum, q, q_tail, k, v, k_stride, v_stride, table, first_key, start, unmasked,
            visible, k_len, scale, DIM, MAIN, TAIL, BLOCK_SIZE, KEYS, False)
    return _fold_keys(
        acc, acc_tail, row_max, row_sum, q, q_tail, k, v, k_stride, v_stride, table, first_key, unmasked, stop,
        visible, k_len, scale, DIM, MAIN, TAIL, BLOCK_SIZE, KEYS, True)


@triton.jit
def _tile_of_program(
    cu_seqlens: tl.tensor, num_spans: tl.tensor, ONE_QUERY: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(KV head, KV heads, tile of rows, its span, its first row there): each span begins a tile of its own, behind all
    others'."""
    if ONE_QUERY:       # neighbouring programs read neighbouring heads of the same blocks
        kv_head, kv_heads, tile, first_row = tl.program_id(0), tl.num_programs(0), tl.program_id(1), 0
        span = tile
    else:               # last rows first: they see the most keys
        kv_head, kv_heads, tile = tl.program_id(1), tl.num_programs(1), tl.num_programs(0) - 1 - tl.program_id(0)
        begun = 0
        for first in range(0, num_spans, 128):
            spans = first + tl.arange(0, 128)
            row = tl.load(cu_seqlens + spans, mask=spans < num_spans, other=0) * GROUP
            begun += tl.sum(((row // ROWS + spans <= tile) & (spans < num_spans)).to(tl.int32))
        span = begun - 1
        first_row = (tile - tl.load(cu_seqlens + span) * GROUP // ROWS - span) * ROWS
    return kv_head, kv_heads, tile, span, first_row


@triton.jit
def _key_ranges(q_len: tl.tensor, k_len: tl.tensor, first_row: tl.tensor, token: tl.tensor, CAUSAL: tl.constexpr,
                ONE_QUERY: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                least: int) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(first key of this split, first one that needs a mask, the one behind the last, keys that each row sees, splits
    that have a key; of no keys, one)."""
    fewest, most = k_len, k_len     # keys that the first row sees, and the last one
    visible = tl.zeros([ROWS], tl.int32) + k_len
    if CAUSAL:
        before = k_len - q_len
        fewest = tl.maximum(before + first_row // GROUP + 1, 0)
        most = tl.minimum(before + (first_row + ROWS - 1) // GROUP + 1, k_len)
        visible = tl.minimum(before + token + 1, k_len)
    size = tl.maximum(tl.cdiv(tl.cdiv(most, KEYS), tl.num_programs(2)), least) * KEYS
    start = tl.program_id(2) * size
    stop = tl.minimum(start + size, most)
    unmasked = start if ONE_QUERY else tl.maximum(tl.minimum(fewest // KEYS * KEYS, stop), start)
    return start, unmasked, stop, visible, tl.maximum(tl.cdiv(most, size), 1)


@triton.jit(do_not_specialize=["num_spans", "table_stride", "tokens", "least"],      # else each of them compiles anew
            do_not_specialize_on_alignment=["cu_seqlens", "seqlens_k", "tables"])
def _attend_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, parts: tl.tensor, log_sums: tl.tensor,
    arrivals: tl.tensor, cu_seqlens: tl.tensor, seqlens_k: tl.tensor, tables: tl.tensor, num_spans: int,
    table_stride: int, scale: float, q_stride: int, q_head_stride: int, k_stride: int, k_head_stride: int,
    v_stride: int, v_head_stride: int, tokens: int, least: int, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAIN: tl.constexpr, TAIL: tl.constexpr, BLOCK_SIZE: tl.constexpr, ONE_QUERY: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """One tile of rows of one KV head over one split of its keys; a BLOCK_SIZE of 0 means keys of its own segment."""
    await_inputs(EARLY)
    kv_head, kv_heads, tile, span, first_row = _tile_of_program(cu_seqlens, num_spans, ONE_QUERY, GROUP, ROWS)
    first_token = tl.load(cu_seqlens + span)
    q_len = tl.load(cu_seqlens + span + 1) - first_token
    if first_row >= q_len * GROUP:
        return
    row = first_row + tl.arange(0, ROWS)
    token, head, filled = row // GROUP, kv_head * GROUP + row % GROUP, row < q_len * GROUP
    dims, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    q_rows = q + ((first_token + token).to(tl.int64) * q_stride + head * q_head_stride)[:, None]
    queries = _load_tile(q_rows + dims[None, :], filled, dims, DIM, True, True)
    queries_tail = _load_tile(q_rows + tail[None, :], filled, tail, DIM, True, True)
    k, v, table = k + kv_head * k_head_stride, v + kv_head * v_head_stride, tables + span.to(tl.int64) * table_stride
    k_len = tl.load(seqlens_k + span) if BLOCK_SIZE else q_len
    start, unmasked, stop, visible, splits = _key_ranges(
        q_len, k_len, first_row, token, BLOCK_SIZE > 0, ONE_QUERY, GROUP, ROWS, KEYS, least)
    if tl.program_id(2) >= splits:
        return
    acc, acc_tail, row_max, row_sum = _walk_keys(
        queries, queries_tail, k, v, k_stride, v_stride, table, first_token, start, unmasked, stop, visible, k_len,
        scale, ROWS, DIM, MAIN, TAIL, BLOCK_SIZE, KEYS, ONE_QUERY)
    place = (first_token + token).to(tl.int64) * (kv_heads * GROUP) + head
    shared = SPLIT
    if SPLIT:
        shared = splits > 1
    if shared:
        _store_part(out, parts, log_sums, arrivals + tile * kv_heads + kv_head, place,
                    kv_heads.to(tl.int64) * GROUP * tokens, splits, filled, acc, acc_tail, row_max, row_sum, dims, tail,
                    DIM, MAIN, ROWS, TAIL)
    else:
        _store_rows(out, place, filled, acc, acc_tail, row_sum, dims, tail, DIM, MAIN)


@triton.jit
def _store_rows(out: tl.tensor, place: tl.tensor, filled: tl.tensor, acc: tl.tensor, acc_tail: tl.tensor,
                row_sum: tl.tensor, dims: tl.tensor, tail: tl.tensor, DIM: tl.constexpr, MAIN: tl.constexpr) -> None:
    """Rows divided by the sums of their softmax; those that see nothing are 0, not NaN."""
    total, rows = tl.where(row_sum > 0, row_sum, 1.0)[:, None], out + (place * DIM)[:, None]
    tl.store(rows + dims[None, :], (acc / total).to(out.dtype.element_ty),
             mask=filled[:, None] & (dims < DIM)[None, :])
    if DIM > MAIN:
        tl.store(rows + tail[None, :], (acc_tail / total).to(out.dtype.element_ty),
                 mask=filled[:, None] & (tail < DIM)[None, :])


@triton.jit
def _store_part(
    out: tl.tensor, parts: tl.tensor, log_sums: tl.tensor, arrived: tl.tensor, place: tl.tensor, of_split: tl.tensor,
    splits: tl.tensor, filled: tl.tensor, acc: tl.tensor, acc_tail: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor,
    dims: tl.tensor, tail: tl.tensor, DIM: tl.constexpr, MAIN: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr,
) -> None:
    """Keeps the rows of this split; the last program of its range to arrive adds all parts up."""
    at = place + tl.program_id(2) * of_split
    _store_rows(parts, at, filled, acc, acc_tail, row_sum, dims, tail, DIM, MAIN)
    tl.store(log_sums + at, row_max + tl.math.log2(row_sum), mask=filled)
    tl.debug_barrier()      # all threads have stored before one of them says so
    if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived, 0)
        _combine(out, parts, log_sums, place, of_split, splits, filled, dims, tail, DIM, MAIN, ROWS, TAIL)


@triton.jit
def _combine(
    out: tl.tensor, parts: tl.tensor, log_sums: tl.tensor, place: tl.tensor, of_split: tl.tensor, splits: tl.tensor,
    filled: tl.tensor, dims: tl.tensor, tail: tl.tensor, DIM: tl.constexpr, MAIN: tl.constexpr, ROWS: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """The splits' rows, weighed by the sums of their softmax; read past L1, where lines may be older than the rows."""
    acc, acc_tail = tl.zeros([ROWS, MAIN], tl.float32), tl.zeros([ROWS, TAIL], tl.float32)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for split in range(0, splits):
        at = place + split * of_split
        log_sum = tl.load(log_sums + at, mask=filled, other=float("-inf"), cache_modifier=".cg")
        new_largest = tl.maximum(largest, log_sum)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, decay = tl.math.exp2(log_sum - shift), tl.math.exp2(largest - shift)
        largest, total = new_largest, total * decay + weight
        rows = parts + (at * DIM)[:, None]
        part = tl.load(rows + dims[None, :], mask=filled[:, None] & (dims < DIM)[None, :], other=0.0,
                       cache_modifier=".cg")
        acc = acc * decay[:, None] + part * weight[:, None]
        if DIM > MAIN:
            part_tail = tl.load(rows + tail[None, :], mask=filled[:, None] & (tail < DIM)[None, :], other=0.0,
                                cache_modifier=".cg")
            acc_tail = acc_tail * decay[:, None] + part_tail * weight[:, None]
    _store_rows(out, place, filled, acc, acc_tail, total, dims, tail, DIM, MAIN)


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens: Tensor, scale: float, tiles: Tiles,
    seqlens_k: Tensor | None = None, block_tables: Tensor | None = None, one_query: bool = False,
    arrivals: Tensor | None = None,
) -> None:
    """Attention of q `[tokens, heads, dim]` into `out`, contiguous and of the same shape.

    With `seqlens_k` (int32 `[spans]`) and `block_tables` (int32 `[spans, width]`), k and v are caches `[blocks,
    block_size, kv_heads, dim]` and a span's queries see what `AttentionBackend.attend` says; `one_query` promises spans
    of one query each. Without them k and v are `[tokens, kv_heads, dim]` and each segment sees its own keys, unmasked.
    `cu_seqlens` (int32 `[spans + 1]`) bounds the queries. Where keys are split, `arrivals` (int32, as many as
    `num_tiles` says) are zeros, and zeros again afterwards: the last program of a range to arrive adds its parts up.
    Equal in plain torch: `attention.torch_backend.TorchBackend`.
    """
    (tokens, heads, dim), kv_heads, num_spans = q.shape, k.shape[-2], len(cu_seqlens) - 1
    if not tokens or not num_spans:
        return
    paged = block_tables is not None
    block_size = k.shape[1] if paged else 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and out.is_contiguous()
    assert not paged or block_size % tiles.keys == 0
    group, main = heads // kv_heads, max(16, 1 << (dim.bit_length() - 1))
    tail = max(16, triton.next_power_of_2(max(dim - main, 1)))
    # Whatever a launch has no use for is given a tensor it does not touch.
    seqlens_k, block_tables = (cu_seqlens if x is None else x for x in (seqlens_k, block_tables))
    parts = log_sums = out
    if tiles.splits > 1:
        assert arrivals is not None and len(arrivals) >= num_tiles(tokens, num_spans, heads, kv_heads, tiles, one_query)
        parts = torch.empty(tiles.splits, *out.shape, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(tiles.splits, tokens, heads, dtype=torch.float32, device=q.device)
    row_tiles = num_tiles(tokens, num_spans, heads, kv_heads, tiles, one_query) // kv_heads
    grid = (kv_heads, row_tiles, tiles.splits) if one_query else (row_tiles, kv_heads, tiles.splits)
    early = starts_early(q)
    _attend_kernel[grid](
        q, k, v, out, parts, log_sums, out if arrivals is None else arrivals, cu_seqlens, seqlens_k, block_tables,
        num_spans, block_tables.stride(0) if paged else 0, scale * LOG2_E,
        q.stride(0), q.stride(1), k.stride(-3), k.stride(-2), v.stride(-3), v.stride(-2), tokens,
        tiles.least, GROUP=group, DIM=dim, MAIN=main, TAIL=tail, BLOCK_SIZE=block_size, ONE_QUERY=one_query,
        ROWS=tiles.rows, KEYS=tiles.keys, SPLIT=tiles.splits > 1, EARLY=early,
        num_warps=tiles.warps, num_stages=tiles.stages, **early_launch(early))


def num_tiles(tokens: int, num_spans: int, heads: int, kv_heads: int, tiles: Tiles, one_query: bool) -> int:
    """Ranges of keys that a launch of `attend` walks: tiles of rows of every KV head, some of them empty."""
    return kv_heads * (num_spans if one_query else tokens * (heads // kv_heads) // tiles.rows + num_spans)
