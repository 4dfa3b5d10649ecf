"""Measures, in the engine, what a picture's KV carries of where it was computed, and what that costs when it is reused.

    python -m tools.reuse_experiments FOLDER [--per-kind 200] [--experiments NAME ...] [--seed 0] [--json FILE]

Of each answer only the first token is asked for; those of the shapes model have no more. A picture that was not shown
first is computed by the first request that asks about it, and found by those at the next ratios, at its own place and
behind the same, so exactly; its rows count as reused there.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tqdm.auto import tqdm

from nanovllm import LLM
from nanovllm.plan import StepPlan
from nanovllm.quality.measure import ONE_ROW, Examiner, measure
from nanovllm.quality.report import ALL, Line, as_dicts, summarize, table
from tools.reuse.donors import EXPERIMENTS, Donors, Experiment

RATIOS = {"0.5": 0.5, "0.05": 0.05, "one row": ONE_ROW}


@contextmanager
def unturned_keys(llm: LLM) -> Iterator[None]:
    """Copies leave keys turned as they were where they come from."""
    launch = llm.runner.launch

    def without_turn(plan: StepPlan) -> Any:
        return launch(replace(plan, copies=tuple(replace(copy, delta=0) for copy in plan.copies)))

    with mock.patch.object(llm.runner, "launch", without_turn):
        yield


def run(llm: LLM, experiment: Experiment, per_kind: int, seed: int, name: str) -> list[Line]:
    """A line for each kind and ratio, of an engine that takes another ordinal's entry where the own one is missing."""
    questions = experiment.questions(per_kind, seed)
    examiner = Examiner(llm, max_tokens=1, seed=seed)
    examiner.prompts = Donors(examiner.prompts, experiment.how)
    with tqdm(total=len(questions), desc=name) as bar, nullcontext() if experiment.turned else unturned_keys(llm):
        outcomes = measure(examiner, questions, list(RATIOS.values()), bar.update, timed_per_kind=0)
    return summarize(outcomes, list(RATIOS))


def open_model(folder: str, device: str | None) -> LLM:
    return LLM(folder, device=device, enable_prefix_caching=False, reuse_any_ordinal=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--seed", type=int, default=0, help="of the questions and of the other prompts")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="write the lines of all kinds to this file")
    args = parser.parse_args(argv)
    lines: dict[str, list[Line]] = {}
    with open_model(args.folder, args.device) as llm:
        for name in args.experiments:
            lines[name] = run(llm, EXPERIMENTS[name], args.per_kind, args.seed, name)
            overall = [line for line in lines[name] if line.kind == ALL]
            print(f"{name}, seed {args.seed}: {table(overall)}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"seed": args.seed, "per_kind": args.per_kind} | {
            name: as_dicts(own) for name, own in lines.items()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
