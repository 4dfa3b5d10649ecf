"""Sums up outcomes: a table for the terminal, JSON for programs, a plot for a page."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from nanovllm.quality.measure import Outcome

ALL = "all"
HEADER = ("accuracy", "first =", "all =", "KL mean", "KL p95", "rows", "share", "ttft")


@dataclass(frozen=True)
class Line:
    """All questions of a kind at one setting."""

    setting: str
    kind: str
    num_questions: int
    accuracy: float | None          # None: questions without answers
    first_token_equal: float        # shares of the questions
    answer_equal: float
    kl_mean: float                  # nats
    kl_p95: float
    rows_computed: float            # image rows a question, in the first layer
    share_computed: float           # of all image rows
    ttft_ms: float | None           # median of those measured; None: of none


def summarize(outcomes: Sequence[Outcome], settings: Sequence[str]) -> list[Line]:
    """A line for every setting and kind; the kinds in the order they come, `ALL` first."""
    kinds = [ALL, *(kind for kind in dict.fromkeys(outcome.kind for outcome in outcomes) if kind != ALL)]
    return [_line(name, kind, [outcome for outcome in outcomes
                               if outcome.setting == number and kind in (ALL, outcome.kind)])
            for kind in kinds for number, name in enumerate(["full prefill", *settings], -1)]


def _line(setting: str, kind: str, outcomes: Sequence[Outcome]) -> Line:
    marks = [outcome.right for outcome in outcomes if outcome.right is not None]
    divergences = [outcome.kl for outcome in outcomes]
    computed = sum(outcome.computed_tokens for outcome in outcomes)
    times = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
    return Line(
        setting, kind, len(outcomes), fmean(marks) if marks else None,
        fmean(outcome.first_equal for outcome in outcomes), fmean(outcome.all_equal for outcome in outcomes),
        fmean(divergences), float(np.percentile(divergences, 95)), computed / len(outcomes),
        computed / sum(outcome.image_tokens for outcome in outcomes),
        1e3 * median(times) if times else None)


def as_dicts(lines: Sequence[Line]) -> list[dict[str, object]]:
    return [asdict(line) for line in lines]


def table(lines: Sequence[Line]) -> str:
    """A block for each kind, a line for each setting."""
    width = max(len(line.setting) for line in lines)
    parts = []
    for kind in dict.fromkeys(line.kind for line in lines):
        own = [line for line in lines if line.kind == kind]
        parts.append(f"{kind} ({own[0].num_questions} questions)\n"
                     + " " * (width + 2) + "".join(f"{name:>10}" for name in HEADER))
        parts += [f"  {line.setting:<{width}}{_cells(line)}" for line in own]
        parts.append("")
    return "\n".join(parts)


def _cells(line: Line) -> str:
    accuracy = "-" if line.accuracy is None else f"{line.accuracy:.3f}"
    ttft = "-" if line.ttft_ms is None else f"{line.ttft_ms:.1f} ms"
    return "".join(f"{cell:>10}" for cell in (
        accuracy, f"{line.first_token_equal:.3f}", f"{line.answer_equal:.3f}", f"{line.kl_mean:.2e}",
        f"{line.kl_p95:.2e}", f"{line.rows_computed:.1f}", f"{line.share_computed:.3f}", ttft))


def plot(lines: Sequence[Line], file: Path, title: str) -> None:
    """Accuracy (agreement with full prefill where no answers were given) and KL against the share of rows computed.

    Raises ValueError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--plot {file} needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    reused = [line for line in lines if line.setting != "full prefill"]
    for kind in dict.fromkeys(line.kind for line in lines):
        own = sorted((line for line in reused if line.kind == kind), key=lambda line: line.share_computed)
        shares = [line.share_computed for line in own]
        style = dict(marker="o", color="black", linewidth=2) if kind == ALL else dict(marker=".", linewidth=1)
        left.plot(shares, [line.first_token_equal if line.accuracy is None else line.accuracy for line in own],
                  label=kind, **style)
        right.plot(shares, [max(line.kl_mean, 1e-9) for line in own], label=kind, **style)
    has_answers = any(line.accuracy is not None for line in lines)
    left.set(ylabel="accuracy" if has_answers else "first token as in full prefill")
    right.set(ylabel="mean KL of the first token, nats", yscale="log")
    for axis in (left, right):
        axis.set(xlabel="share of image rows computed", xscale="log")
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(file, dpi=130)
