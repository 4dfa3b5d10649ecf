"""Runs all that is to be measured on two GPUs, the most important first, within a limit of time.

    python -m benchmarks.two_gpus --out FOLDER [--seconds 470] [--only NAME ...]

Prints what `bench.py` prints, and writes its JSON lines, with the name of the run, to FOLDER/two_gpus.jsonl.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parent.parent
LARGE = "--seeds 0 --num-seqs 128 --max-input 512 --max-output 256"         # a few seconds also for 32B on one GPU
PICTURE = "--mode image --size 7b --ratios 0 0.05 --repeats 3"
# name -> (seconds, command lines); several run at once, each with a GPU of its own. LOCAL_WORLD_SIZE=1 says that ranks
# are on different hosts, which keeps them from summing through each other's memory.
RUNS: dict[str, tuple[int, list[str]]] = {
    "sums": (60, ["-m tools.bench_sums"]),
    "0.6b, 2 ranks": (75, ["bench.py --size 0.6b --tp 2 --seeds 0 1"]),
    "0.6b, 2 ranks, NCCL alone": (75, ["LOCAL_WORLD_SIZE=1 bench.py --size 0.6b --tp 2 --seeds 0"]),
    "0.6b, 1 rank": (60, ["bench.py --size 0.6b --seeds 0 1"]),
    "32b, 2 ranks": (100, [f"bench.py --size 32b --tp 2 {LARGE}"]),
    "32b, 1 rank": (100, [f"bench.py --size 32b {LARGE}"]),
    "8b, 2 ranks": (80, [f"bench.py --size 8b --tp 2 {LARGE}"]),
    "8b, 1 rank": (80, [f"bench.py --size 8b {LARGE}"]),
    "7b picture, 2 ranks, split": (80, [f"bench.py --tp 2 {PICTURE}"]),
    "7b picture, 2 ranks, data": (80, [f"bench.py --tp 2 --vision-parallel data {PICTURE}"]),
    "7b picture, 1 rank": (60, [f"bench.py {PICTURE}"]),
    "0.6b, two engines": (60, ["bench.py --size 0.6b --seeds 0 1"] * 2),
    "0.6b, 2 ranks, latency": (60, ["bench.py --size 0.6b --tp 2 --mode latency --max-output 256"]),
    "32b, 2 ranks, batch 1": (80, ["bench.py --size 32b --tp 2 --mode latency --num-seqs 1 --max-output 128"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=470, help="for all runs; what does not fit any more is left")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    end = monotonic() + args.seconds
    with (args.out / "two_gpus.jsonl").open("a") as results:
        for name in args.only:
            limit = min(RUNS[name][0], end - monotonic())
            start = monotonic()
            print(f"\n==== {name}", flush=True)
            for line in run(RUNS[name][1], limit):
                print(line)
                if line.startswith("{"):
                    results.write(json.dumps({"run": name} | json.loads(line)) + "\n")
            results.flush()
            print(f"==== {name}: {monotonic() - start:.0f} s", flush=True)


def run(commands: list[str], limit: float) -> Iterator[str]:
    """What the commands print, one after the other, though they run at once; those not done in `limit` s are killed."""
    deadline = monotonic() + limit
    with started(commands) as processes:
        for process in processes:
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - monotonic()))
                note = "" if process.returncode == 0 else f"failed with {process.returncode}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                note = f"not done after {limit:.0f} s"
            yield from [*output.splitlines()[-60:], *([note] if note else [])]


@contextmanager
def started(commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = []
    try:
        for index, command in enumerate(commands):
            words = command.split()
            settings = dict(word.split("=") for word in words if "=" in word)
            alone = {"CUDA_VISIBLE_DEVICES": str(index)} if len(commands) > 1 else {}
            processes.append(subprocess.Popen(
                [sys.executable, *words[len(settings):]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                cwd=ROOT, env=os.environ | alone | settings, start_new_session=True))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    main()
