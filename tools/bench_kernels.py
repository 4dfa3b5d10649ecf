"""Checks every kernel and attention backend against its torch twin in float32, and times it beside its floor.

    python tools/bench_kernels.py [--sweep] [--only WORD] [--json FILE]

On a CUDA device at the sizes of the published models, from CUDA graphs whose calls rotate among inputs larger than the
L2 cache; on the CPU (TRITON_INTERPRET=1) at tiny sizes, to check the script itself. `--sweep` also tries tile sizes.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from attention_cases import attention_cases
from kernel_case import GPU, TOLERANCE, Case, Run
from layer_cases import other_cases
from torch import Tensor


def time_ms(run: Run, sets: int, eager: bool) -> float:
    """Milliseconds of one call: the median of several rounds."""
    for i in range(min(sets, 3)):
        run(i)
    if GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run(0)
    if not GPU:
        return (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    slow = time.perf_counter() - begin > 5e-3
    calls, num_rounds = (2, 4) if slow else (max(sets, 8), 11)

    def all_calls() -> None:
        for i in range(calls):
            run(i % sets)

    if not eager:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            all_calls()
        all_calls = graph.replay
    rounds = []
    for _ in range(num_rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        all_calls()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / calls)
    return statistics.median(rounds[1:])


def error_of(out: Tensor, expected: Tensor | None) -> float:
    if expected is None:
        return 0.0
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


def measure(case: Case, sweep: bool) -> Iterator[dict[str, Any]]:
    """One row for each implementation (and tile size) of a case."""
    expected = case.expected() if case.expected is not None else None
    for name, run in {**case.runs, **(case.sweep if sweep else {})}.items():
        row: dict[str, Any] = dict(case=case.name, by=name, floor_ms=case.floor_ms)
        try:
            error = error_of(run(0), expected)
            ms = time_ms(run, case.sets, name in case.eager)
            row |= dict(ms=ms, error=error, ratio=ms / case.floor_ms, ok=error < TOLERANCE,
                        tb_s=case.bytes / ms / 1e9, tflop_s=case.flops / ms / 1e9)
        except Exception as failure:
            row |= dict(ms=float("nan"), ok=False, failure=f"{type(failure).__name__}: {str(failure)[:150]}")
        yield row


def show(row: dict[str, Any]) -> None:
    if "failure" in row:
        print(f"{row['case']:34} {row['by']:26} FAILED {row['failure']}", flush=True)
        return
    print(f"{row['case']:34} {row['by']:26} {row['ms']:9.4f} ms  floor {row['floor_ms']:8.4f}  x{row['ratio']:6.2f}  "
          f"{row['tb_s']:5.2f} TB/s {row['tflop_s']:6.0f} TFLOP/s  error {row['error']:.1e} "
          f"{'' if row['ok'] else 'WRONG'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes")
    parser.add_argument("--only", default="", help="only cases whose name holds this word")
    parser.add_argument("--json", help="file for one JSON line a row")
    options = parser.parse_args()
    torch.manual_seed(0)
    print("device", torch.cuda.get_device_name() if GPU else "cpu", "torch", torch.__version__, flush=True)
    rows = []
    with torch.inference_mode():
        for case in (case for cases in (attention_cases, other_cases) for case in cases()):
            if options.only in case.name:
                for row in measure(case, options.sweep):
                    rows.append(row)
                    show(row)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print("\nbest of each case")
    for name in dict.fromkeys(row["case"] for row in rows):
        ours = [row for row in rows if row["case"] == name and row["by"] not in ("fa2", "fa3", "torch") and row["ok"]]
        for row in sorted(ours, key=lambda row: row["ms"])[:3]:
            show(row)
    print("wrong or failed:", [(row["case"], row["by"]) for row in rows if not row["ok"]])


if __name__ == "__main__":
    main()
