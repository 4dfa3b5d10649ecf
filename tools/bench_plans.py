"""Times what it takes to tell a rank a step of decodes, and counts its bytes: whole plans, and what changed since.

    python -m tools.bench_plans
"""
from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from time import perf_counter
from typing import Any

import numpy as np

from nanovllm.plan import SamplingBatch, SpanTable, Stage, StepPlan
from nanovllm.runner.channel import pack, receive, send
from nanovllm.runner.plan_changes import NOT_SAMPLED, PlanMemory

SEQS, BLOCK_SIZE, STEPS = 256, 256, 400
WIDTHS = (4, 16, 128)       # blocks: 1,024, 4,096 and 32,768 tokens
BUFFER_BYTES = 1 << 20
LEAVES_EVERY = 8            # steps: one sequence ends, and another takes its batch row


def decodes(width: int) -> Iterator[StepPlan]:
    """Steps of a batch whose sequences are spread over up to `width` blocks, one step of them in flight (overlap)."""
    random = np.random.default_rng(0)
    starts = random.integers((width - 1) * BLOCK_SIZE, size=SEQS)
    tables = random.integers(5000, size=(SEQS, width + STEPS // BLOCK_SIZE + 2)).astype(np.int32)
    rows, ints, floats = np.arange(SEQS), np.zeros(SEQS, np.int64), np.ones(SEQS, np.float32)
    sampling = SamplingBatch(floats, ints, floats, floats, ints, ints, floats, rows)
    for step in range(STEPS):
        if step % LEAVES_EVERY == LEAVES_EVERY - 1:
            row = rows[step % SEQS]
            rows = np.append(np.delete(rows, step % SEQS), row)
            starts[row], tables[row] = 300, random.integers(5000, size=tables.shape[1])
        used = int(starts.max()) // BLOCK_SIZE + 1
        spans = SpanTable(starts[rows], np.ones(SEQS, np.int64), tables[rows, :used], rows)
        yield StepPlan(ints, spans.starts[None], (Stage(0, None, spans),), np.arange(SEQS), sampling,
                       np.stack((np.arange(SEQS), rows)))
        starts = starts + 1


def medians(plans: list[StepPlan], tell: Callable[[StepPlan], Any], hear: Callable[[Any], object]) -> str:
    """Bytes of a step, and the microseconds that rank 0 and another rank work on them."""
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)     # one thread sends and receives
    sizes, told, heard = [], [], []
    for plan in plans:
        moments = [perf_counter()]
        message = pack(tell(plan))
        send(ours, message)
        moments.append(perf_counter())
        hear(receive(theirs))
        moments.append(perf_counter())
        sizes.append(len(message.head) + sum(buffer.nbytes for buffer in message.buffers))
        told.append(moments[1] - moments[0])
        heard.append(moments[2] - moments[1])
    return f"{np.median(sizes):,.0f} | {1e6 * np.median(told):.0f} | {1e6 * np.median(heard):.0f}"


def main() -> None:
    print("| blocks of a sequence, at most | sent | bytes | us on rank 0 | us on the other |\n|---|---|---|---|---|")
    for width in WIDTHS:
        plans, here, there = list(decodes(width)), PlanMemory(), PlanMemory()
        print(f"| {width} | whole plans | {medians(plans, without_sampling, lambda plan: plan)} |")
        print(f"| {width} | what changed | {medians(plans, here.changes, there.restore)} |")


def without_sampling(plan: StepPlan) -> StepPlan:
    return replace(plan, sampling=NOT_SAMPLED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
