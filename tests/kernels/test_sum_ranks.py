"""The kernel that sums over ranks, each rank in turn in Triton's interpreter: what the others send is there before."""
from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels.sum_ranks import sum_ranks
from nanovllm.peer_memory import BLOCK_BYTES, MAX_BLOCKS, buffer_bytes
from tests.interpreted import run_interpreted


def send_by_hand(buffer: Tensor, x: Tensor, counts: Tensor) -> None:
    """What rank 1 of 2 puts into rank 0's buffer, whose sums so far are `counts`."""
    flags = buffer[:MAX_BLOCKS * 2 * 4].view(torch.int32).view(MAX_BLOCKS, 2)
    places = buffer[flags.nbytes:].view(2, 2, MAX_BLOCKS, BLOCK_BYTES)
    for block, part in enumerate(x.split(BLOCK_BYTES // x.itemsize)):
        count = flags[block, 1] = counts[block] + 1
        places[int(count) % 2, 1, block, :part.nbytes] = part.view(torch.uint8)


def check_sums(dtype: torch.dtype, first_count: int) -> None:
    """Two ranks, one after the other: the first is sent the other's part by hand, the second is sent the first's."""
    ranks, generator = 2, torch.Generator().manual_seed(0)
    buffers = [torch.zeros(buffer_bytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    counts = [torch.full((MAX_BLOCKS,), first_count, dtype=torch.int32) for _ in range(ranks)]
    for size in (5, 5, 5000, 2048, 1, 5000, 0):         # blocks behind the first have done fewer sums
        parts = [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]
        expected = parts[0] + parts[1]
        send_by_hand(buffers[0], parts[1], counts[0])
        for rank in range(ranks):
            sum_ranks(parts[rank], addresses, counts[rank], rank, BLOCK_BYTES)
        assert torch.equal(parts[0], expected) and torch.equal(parts[1], expected), size
    assert torch.equal(counts[0], counts[1])


def check_all() -> None:
    check_sums(torch.float32, 0)
    check_sums(torch.float16, 2**31 - 3)        # after so many sums the count goes on below zero


def test_interpreted_kernel_adds_up() -> None:
    run_interpreted(__name__, "check_all")
