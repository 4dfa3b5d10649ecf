"""The figures of a benchmark: a table for people, JSON lines for programs, a bar chart for both."""
from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

COLUMNS = ("mode", "engine", "seqs", "seed", "ratio", "moved", "computed", "tok/s", "seconds", "ttft ms", "hash ms",
           "call ms", "floor", "of floor")


@dataclass(frozen=True)
class Setting:
    """What all results of one run have in common."""

    model: str
    weights: str                        # "checkpoint", "dummy" or "demo"
    device: str
    torch: str
    backend: str
    commit: str | None


@dataclass(frozen=True)
class Result:
    """One measured piece of work; None where a figure does not apply."""

    mode: str                           # "text", "latency", "image cold" or "image warm"; of a peer also "image"
    engine: str                         # "nanovllm" or a peer
    num_seqs: int
    seconds: float                      # of all that was measured
    seed: int | None = None             # of the work
    output_tok_per_s: float | None = None
    num_computed_tokens: int | None = None      # prompt tokens that no cache held
    ttft_ms: float | None = None        # median
    hash_ms: float | None = None        # median; a part of ttft_ms
    call_ms: float | None = None        # median of whole `generate` calls
    ratio: float | None = None          # recompute_ratio
    moved: bool | None = None           # the picture stands behind other text than before
    floor: float | None = None          # best possible on this device: tok/s, in image mode ms of a call

    @property
    def share_of_floor(self) -> float | None:
        """How much of what the device can do was reached, 0..1."""
        if self.floor is None:
            return None
        if self.output_tok_per_s is not None:
            return self.output_tok_per_s / self.floor
        return None if self.call_ms is None else self.floor / self.call_ms

    @property
    def label(self) -> str:
        named = {"seed": self.seed, "ratio": self.ratio}
        parts = [f"{name} {value}" for name, value in named.items() if value is not None] + ["moved"] * bool(self.moved)
        return ", ".join([self.mode, f"{self.num_seqs} at once", *parts])

    def cells(self) -> list[str]:
        share = self.share_of_floor
        numbers = [self.output_tok_per_s, self.seconds, self.ttft_ms, self.hash_ms, self.call_ms, self.floor]
        values = [self.mode, self.engine, self.num_seqs, self.seed, self.ratio, self.moved, self.num_computed_tokens,
                  *map(_number, numbers), None if share is None else f"{share:.0%}"]
        return ["-" if value is None else str(value) for value in values]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def setting_of(model: str, weights: str, device: torch.device, backend: str, commit: str | None) -> Setting:
    return Setting(model, weights, device_name(device), torch.__version__, backend, commit or commit_here())


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = torch.get_num_threads()
    return f"{model or platform.processor() or 'CPU'}, {threads} thread{'s' if threads > 1 else ''}"


def commit_here() -> str | None:
    """The commit of this repository; None where git does not know."""
    if shutil.which("git") is None:
        return None
    git = subprocess.run(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
                         capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else None


def print_report(setting: Setting, results: Sequence[Result]) -> None:
    """The table, how peers compare, then one JSON line for each result."""
    print(f"\n{setting.model} ({setting.weights} weights), {setting.device}, torch {setting.torch}, "
          f"attention {setting.backend}\n")
    rows = [list(COLUMNS), *(result.cells() for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                        for i, (cell, width) in enumerate(zip(row, widths))))
    for line in comparisons(results):
        print(line)
    print()
    for result in results:
        print(json.dumps(asdict(setting) | asdict(result)))


def comparisons(results: Sequence[Result]) -> list[str]:
    """For each result of a peer, how much faster we were at the same work."""
    lines = []
    for peer in results:
        for own in results:
            same = own.mode.startswith(peer.mode) and (own.num_seqs, own.seed) == (peer.num_seqs, peer.seed)
            if peer.engine != "nanovllm" and own.engine == "nanovllm" and same:
                lines.append(f"{own.label}: {speedup(own, peer):.2f} x {peer.engine}")
    return lines


def speedup(own: Result, peer: Result) -> float:
    if own.output_tok_per_s is not None and peer.output_tok_per_s is not None:
        return own.output_tok_per_s / peer.output_tok_per_s
    assert own.call_ms is not None and peer.call_ms is not None
    return peer.call_ms / own.call_ms


def plot(setting: Setting, results: Sequence[Result], file: Path) -> None:
    """A bar for each result: tokens per second, in image mode ms of a call. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    is_rate = results[0].output_tok_per_s is not None
    labels = [f"{result.engine}: {result.label}" for result in results]
    values = [(result.output_tok_per_s if is_rate else result.call_ms) or 0.0 for result in results]
    figure = Figure(figsize=(9, 1 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots()
    axes.barh(labels, values)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens per second" if is_rate else "ms of a whole call, median")
    axes.set_title(f"{setting.model} on {setting.device}")
    figure.savefig(file)
