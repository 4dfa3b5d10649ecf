"""Times sums over two GPUs, through NCCL and through peer memory, as the CUDA graph of a step runs them.

    python -m tools.bench_sums
"""
from __future__ import annotations

import json
from typing import Any

import torch

from nanovllm.attention.fused import TritonOps
from nanovllm.parallel import TensorParallel
from nanovllm.runner.workers import Ranks

SIZES = [1 << power for power in range(11, 23)]         # bytes
SUMS, REPLAYS = 50, 10


class Timings:
    """Made on every rank: microseconds of a sum by size and way."""

    def __init__(self, parallel: TensorParallel, device: torch.device) -> None:
        ways = {"nccl_us": parallel, "peer_us": parallel.with_small_sums(TritonOps.sum_ranks)}
        self.rows: list[dict[str, Any]] = []
        for size in SIZES:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
            times = {name: round(microseconds(way, x), 2) for name, way in ways.items()}
            self.rows.append({"bytes": size, "peer_memory": parallel.peers is not None} | times)


def microseconds(parallel: TensorParallel, x: torch.Tensor) -> float:
    """Of one sum among many in a graph."""
    parallel.sum(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            parallel.sum(x)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    stop.record()
    stop.synchronize()
    graph.reset()
    return 1000 * start.elapsed_time(stop) / (SUMS * REPLAYS)


def main() -> None:
    from tools.bench_sums import Timings as Imported  # under a name that the other rank can import

    devices = [torch.device("cuda", index) for index in range(2)]
    ranks = Ranks(devices, False, Imported, ())
    try:
        with ranks.together():
            timings = Imported(ranks.parallel, devices[0])
            ranks.await_ready()
    finally:
        ranks.close()
    for row in timings.rows:
        print(json.dumps({"mode": "sum"} | row))


if __name__ == "__main__":
    main()
