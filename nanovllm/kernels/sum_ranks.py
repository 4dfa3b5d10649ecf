"""Sums a small tensor over the ranks of one host in one launch: each sends its own to all the others, then adds up."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_ranks_kernel(
    x: tl.tensor, addresses: tl.tensor, counts: tl.tensor, num_elements: int, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr, MAX_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """One block of x. Sums take turns between two places for what is sent: a rank that sends its sum n has seen the
    others' sum n - 1 of this block, before which they had read all of n - 2."""
    block = tl.program_id(0)
    count = tl.load(counts + block) + 1
    place = block * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_elements
    own = tl.load(x + place, mask=mask, other=0.0)
    # Bytes from the start of a buffer to this block of what rank 0 sends for this sum; other ranks' lie behind it.
    sent = MAX_BLOCKS * RANKS * 4 + ((count & 1) * RANKS * MAX_BLOCKS + block) * BLOCK_BYTES
    within = tl.arange(0, BLOCK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            data = (tl.load(addresses + rank) + sent + RANK * MAX_BLOCKS * BLOCK_BYTES).to(x.dtype)
            tl.store(tl.multiple_of(data, 16) + within, own, mask=mask)
    tl.debug_barrier()          # all of the block is on its way before one thread says so, to be seen in that order
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = (tl.load(addresses + rank) + (block * RANKS + RANK) * 4).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flag, count, sem="release", scope="sys")
    here = tl.load(addresses + RANK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = (here + (block * RANKS + rank) * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - count < 0:       # the count may wrap around
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):         # in one order, so that all ranks get the same bits
        part = own
        if rank != RANK:
            data = (here + sent + rank * MAX_BLOCKS * BLOCK_BYTES).to(x.dtype)
            part = tl.load(tl.multiple_of(data, 16) + within, mask=mask, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    tl.store(x + place, total.to(x.dtype.element_ty), mask=mask)
    tl.store(counts + block, count)


def sum_ranks(x: Tensor, addresses: Tensor, counts: Tensor, rank: int, block_bytes: int) -> None:
    """x, contiguous floats of any shape, becomes the sum of all ranks' x, added up in float32 and rounded once.

    addresses: int64 `[ranks]` of each rank's buffer: int32 counters `[max_blocks, ranks]`, then what ranks send,
    `[2, ranks, max_blocks, block_bytes]`; zeros before the first sum. counts: int32 `[max_blocks]`, zeros likewise.
    At most `max_blocks * block_bytes` bytes, and the same number on every rank. Waits for the other ranks on the
    device. Equal: a library's all-reduce.
    """
    assert x.is_contiguous() and x.nbytes <= len(counts) * block_bytes
    block = block_bytes // x.element_size()
    if x.numel():
        _sum_ranks_kernel[(triton.cdiv(x.numel(), block),)](
            x, addresses, counts, x.numel(), RANK=rank, RANKS=len(addresses),
            BLOCK_BYTES=block_bytes, MAX_BLOCKS=len(counts), BLOCK=block, num_warps=8)
