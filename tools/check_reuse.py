"""Checks on a trained shapes model what reuse must keep apart: places, ordinals, beginnings; exits with 1 if one fails.

    python -m tools.check_reuse FOLDER [--per-kind 200] [--seed 0] [--device cuda]

Places: at places moved by a hundred positions and more, keys that are not turned give at least 20 times the KL of
turned ones, and fewer right answers. Ordinals: pictures that come from another ordinal lose at least 20 points on
questions about several. Beginnings: pictures first seen bare, at the very start of a prompt, give more KL than pictures
first seen behind the chat template.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from nanovllm import LLM
from nanovllm.quality.report import ALL, Line
from tools.reuse.donors import EXPERIMENTS
from tools.reuse_experiments import open_model, run

TURNED, NOT_TURNED, ORDINALS = "elsewhere", "elsewhere, keys not turned", "other ordinals"
BARE, BEHIND_TEMPLATE = "bare", "same text"
RATIO = "0.05"
MIN_KL_FACTOR, MIN_POINTS = 20, 0.20


@dataclass(frozen=True)
class Check:
    """What was found, and whether it is what reuse is built on."""

    name: str
    found: str
    passed: bool


def checks(lines: Mapping[str, Mapping[str, Line]]) -> list[Check]:
    """The checks on lines by experiment and setting."""
    def accuracy(name: str, setting: str = RATIO) -> float:
        value = lines[name][setting].accuracy
        assert value is not None, "held-out questions have answers"
        return value

    turned, not_turned = lines[TURNED][RATIO].kl_mean, lines[NOT_TURNED][RATIO].kl_mean
    bare, behind = lines[BARE][RATIO].kl_mean, lines[BEHIND_TEMPLATE][RATIO].kl_mean
    full = accuracy(ORDINALS, "full prefill")
    return [
        Check("places", f"KL {not_turned:.2e} with keys left as they were, {turned:.2e} with keys turned "
              f"({not_turned / turned:.0f} x); accuracy {accuracy(NOT_TURNED):.3f} and {accuracy(TURNED):.3f}",
              not_turned >= MIN_KL_FACTOR * turned and accuracy(NOT_TURNED) < accuracy(TURNED)),
        Check("ordinals", f"accuracy {accuracy(ORDINALS):.3f} from other ordinals, {full:.3f} in full",
              full - accuracy(ORDINALS) >= MIN_POINTS),
        Check("beginnings", f"KL {bare:.2e} first seen bare, {behind:.2e} behind the chat template; accuracy "
              f"{accuracy(BARE):.3f} and {accuracy(BEHIND_TEMPLATE):.3f}", bare > behind)]


def measure(llm: LLM, per_kind: int, seed: int) -> dict[str, dict[str, Line]]:
    """For each experiment the lines of all kinds together, by setting."""
    return {name: {line.setting: line for line in run(llm, EXPERIMENTS[name], per_kind, seed, name)
                   if line.kind == ALL}
            for name in (TURNED, NOT_TURNED, ORDINALS, BARE, BEHIND_TEMPLATE)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the questions and of the other prompts")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    with open_model(args.folder, args.device) as llm:
        found = checks(measure(llm, args.per_kind, args.seed))
    for check in found:
        print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.found}")
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
