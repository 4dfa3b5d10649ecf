"""Ranks meet over keys that each process numbers in its own way; on GPUs, sums through peer memory are NCCL's sums."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore

from nanovllm.parallel import TensorParallel
from nanovllm.peer_memory import BLOCK_BYTES, MAX_SUM_BYTES, _Meeting
from nanovllm.runner.workers import Ranks

ROUNDS = 3


def test_keys_are_numbered_by_the_engine_not_the_process() -> None:
    shared = HashStore()
    meetings = _Meeting(shared), _Meeting(shared)           # which C++ alone does not keep
    here, there = (PrefixStore("by C++", meeting) for meeting in meetings)
    for first, second in ((7, 0), (8, 1)):
        here.set(f"Memory/{first}/0", "a")
        there.set(f"Memory/{second}/1", "b")
        here.wait([f"Memory/{first}/1"])
        assert (there.get(f"Memory/{second}/0"), here.get(f"Memory/{first}/1")) == (b"a", b"b")


class Sums:
    """Made on both ranks: some sums through the group, and through peer memory, at once and as a CUDA graph."""

    def __init__(self, parallel: TensorParallel, device: torch.device) -> None:
        from nanovllm.attention.fused import TritonOps  # Triton is not installed everywhere

        assert parallel.peers is not None, "these GPUs do not map each other's memory"
        fast = parallel.with_small_sums(TritonOps.sum_ranks)
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for x in tensors(parallel.rank, device):
            expected, summed, replayed = parallel.sum(x.clone()), fast.sum(x.clone()), x.clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                replayed.copy_(x)
                for _ in range(ROUNDS):
                    fast.sum(replayed)
            graph.replay()
            graph.replay()
            torch.cuda.synchronize()
            repeated = x.clone()
            for _ in range(ROUNDS):
                parallel.sum(repeated)
            graph.reset()
            self.pairs += [(expected, summed), (repeated, replayed)]


def tensors(rank: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32):
        for num_bytes in (4, BLOCK_BYTES, BLOCK_BYTES + 20, 300_000, MAX_SUM_BYTES):
            yield torch.randn(num_bytes // dtype.itemsize, generator=generator, device=device).to(dtype)


@pytest.mark.multi_gpu
def test_small_sums_equal_those_of_nccl() -> None:
    devices = [torch.device("cuda", index) for index in range(2)]
    ranks = Ranks(devices, False, Sums, ())
    try:
        with ranks.together():
            sums = Sums(ranks.parallel, devices[0])
            ranks.await_ready()
        for expected, summed in sums.pairs:
            torch.testing.assert_close(summed, expected)        # of two ranks, each sum is rounded once either way
    finally:
        ranks.close()
