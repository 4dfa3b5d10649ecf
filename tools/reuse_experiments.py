"""Measures what a picture's KV carries of where it was computed, and what that costs when it is reused.

    python -m tools.reuse_experiments FOLDER [--per-kind 200] [--experiments NAME ...] [--seed 0] [--device cuda]
"""
from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from tqdm.auto import tqdm

from nanovllm import LLM
from nanovllm.plan import StepPlan
from nanovllm.quality.measure import ONE_ROW, Examiner, measure
from nanovllm.quality.prompts import OTHER_QUESTION, OTHER_SYSTEM, Inputs, Prompts
from nanovllm.quality.questions import Message, Question, chat
from nanovllm.quality.report import summarize, table
from nanovllm.quality.shapes import draw_scene, held_out

RATIOS = {"0.5": 0.5, "0.05": 0.05, "one row": ONE_ROW}
SYSTEM_IN_ANOTHER_LANGUAGE = "Du siehst gleich Bilder und sollst in wenigen Worten sagen, was darauf zu sehen ist. " * 4


def behind(system: str, num_pictures: int) -> tuple[Message, ...]:
    return ({"role": "system", "content": [{"type": "text", "text": system}]}, *chat(OTHER_QUESTION, num_pictures))


class Donors(Prompts):
    """Prompts that show a question's pictures first; `how` makes such a prompt from the pictures."""

    def __init__(self, like: Prompts, how: Callable[[tuple[Any, ...], random.Random], Question], seed: int) -> None:
        self.processor, self.picture_text = like.processor, like.picture_text
        self.how, self.rng = how, random.Random(seed)

    def showing(self, question: Question, first_seen: str) -> Inputs:
        return self.asking(self.how(question.pictures, self.rng))


def elsewhere(pictures: tuple[Any, ...], _: random.Random) -> Question:
    return Question(behind(OTHER_SYSTEM, len(pictures)), pictures)


def same_text(pictures: tuple[Any, ...], _: random.Random) -> Question:
    return Question(chat(OTHER_QUESTION, len(pictures)), pictures)


def other_language(pictures: tuple[Any, ...], _: random.Random) -> Question:
    return Question(behind(SYSTEM_IN_ANOTHER_LANGUAGE, len(pictures)), pictures)


def other_ordinals(pictures: tuple[Any, ...], _: random.Random) -> Question:
    """Each picture at an ordinal that is not its own."""
    turned = pictures[1:] + pictures[:1]
    return Question(behind(OTHER_SYSTEM, len(turned)), turned)


def other_pictures_before(pictures: tuple[Any, ...], rng: random.Random) -> Question:
    """The last picture at its own ordinal, the ones before it replaced, in size as well; they are computed anew."""
    shown = (*(draw_scene(rng) for _ in pictures[:-1]), pictures[-1])
    return Question(behind(OTHER_SYSTEM, len(shown)), shown)


def earlier_turn(pictures: tuple[Any, ...], _: random.Random) -> Question:
    """The pictures in the second turn of a conversation."""
    first = ({"role": "user", "content": "how many coins did it cost?"}, {"role": "assistant", "content": "5"})
    return Question((*first, *chat(OTHER_QUESTION, len(pictures))), pictures)


EXPERIMENTS = {each.__name__: each for each in (
    elsewhere, same_text, other_language, other_ordinals, other_pictures_before, earlier_turn)}
UNROTATED = "unrotated"         # elsewhere, with the keys left as they were


@contextmanager
def unrotated_keys(llm: LLM) -> Iterator[None]:
    """Copies leave keys turned as they were where they come from."""
    launch = llm.runner.launch

    def without_turn(plan: StepPlan) -> Any:
        return launch(replace(plan, copies=tuple(replace(copy, delta=0) for copy in plan.copies)))

    with mock.patch.object(llm.runner, "launch", without_turn):
        yield


def run(llm: LLM, name: str, per_kind: int, seed: int) -> str:
    """The table of one experiment."""
    questions = [Question(chat(asked.question, len(asked.scenes), asked.before, asked.question_first), asked.scenes,
                          asked.kind, asked.answer) for asked in held_out(per_kind, seed)]
    if name in ("other_ordinals", "other_pictures_before"):
        questions = [question for question in questions if len(question.pictures) > 1]
    examiner = Examiner(llm)
    examiner.prompts = Donors(examiner.prompts, EXPERIMENTS.get(name, elsewhere), seed)
    with tqdm(total=len(questions), desc=name) as bar:
        if name == UNROTATED:
            with unrotated_keys(llm):
                outcomes = measure(examiner, questions, list(RATIOS.values()), bar.update)
        else:
            outcomes = measure(examiner, questions, list(RATIOS.values()), bar.update)
    return f"{name}, seed {seed}\n{table(summarize(outcomes, list(RATIOS)))}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--experiments", nargs="+", choices=(*EXPERIMENTS, UNROTATED),
                        default=[*EXPERIMENTS, UNROTATED])
    parser.add_argument("--seed", type=int, default=0, help="of the questions")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    for any_ordinal in (False, True):
        names = [name for name in args.experiments if (name == "other_ordinals") == any_ordinal]
        if names:
            with LLM(args.folder, device=args.device, enable_prefix_caching=False,
                     reuse_any_ordinal=any_ordinal) as llm:
                for name in names:
                    print(run(llm, name, args.per_kind, args.seed), flush=True)


if __name__ == "__main__":
    main()
