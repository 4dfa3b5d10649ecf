"""Prompts in which pictures are first seen, each unlike the prompt that asks about them in one respect."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.quality.pictures import draw
from nanovllm.quality.prompts import OTHER_QUESTION, Inputs, Prompts, behind, other_system, system_message
from nanovllm.quality.questions import Message, Question, builtin_questions, chat
from nanovllm.quality.shapes import KINDS, SINGLE_KINDS, draw_scene

Pictures = tuple[Any, ...]
SYSTEM_IN_ANOTHER_LANGUAGE = "Du siehst gleich Bilder und sollst in wenigen Worten sagen, was darauf zu sehen ist. " * 4
MANY = (4, 8)                   # ordinals, from 1, that the shapes model has never been trained on
SEVERAL_KINDS = ("two images", "three images", "which image")


class Donors(Prompts):
    """Prompts that first show a question's pictures as `how` says."""

    def __init__(self, like: Prompts, how: Callable[[Pictures, random.Random], Question]) -> None:
        self.processor, self.picture_text, self.how = like.processor, like.picture_text, how

    def showing(self, question: Question, first_seen: str, rng: random.Random) -> Inputs:
        return self.shown(self.how(question.pictures, rng), rng)

    def shown(self, question: Question, rng: random.Random) -> Inputs:
        """A prompt of `how`; without messages the pictures stand bare."""
        return self.asking(question) if question.messages else super().showing(question, "bare", rng)


# ---------------------------------------------------------------- how pictures are first seen

def elsewhere(pictures: Pictures, rng: random.Random) -> Question:
    """Behind a long system text: for the shapes model at places more than a hundred positions further on."""
    return Question(behind(other_system(rng), len(pictures)), pictures)


def same_text(pictures: Pictures, _: random.Random) -> Question:
    """Behind the chat template's own system text."""
    return Question(chat(OTHER_QUESTION, len(pictures)), pictures)


def bare(pictures: Pictures, _: random.Random) -> Question:
    """At the very start of a prompt that has no chat template around it."""
    return Question((), pictures)


def other_language(pictures: Pictures, _: random.Random) -> Question:
    """Behind a system text in German."""
    return Question(behind(SYSTEM_IN_ANOTHER_LANGUAGE, len(pictures)), pictures)


def earlier_turn(pictures: Pictures, _: random.Random) -> Question:
    """In the second turn of a conversation."""
    first = ({"role": "user", "content": "how many coins did it cost?"}, {"role": "assistant", "content": "5"})
    return Question((*first, *chat(OTHER_QUESTION, len(pictures))), pictures)


def other_ordinals(pictures: Pictures, rng: random.Random) -> Question:
    """Each picture at an ordinal that is not its own."""
    turned = pictures[1:] + pictures[:1]
    return Question(behind(other_system(rng), len(turned)), turned)


def other_pictures_before(pictures: Pictures, rng: random.Random) -> Question:
    """The last picture at its own ordinal, the ones before it replaced, in size as well."""
    shown = (*(draw_scene(rng) for _ in pictures[:-1]), pictures[-1])
    return Question(behind(other_system(rng), len(shown)), shown)


def video_before(pictures: Pictures, rng: random.Random) -> Question:
    """The last picture at its own ordinal, behind videos of four frames in place of the pictures before it."""
    videos: list[Message] = []
    for _ in pictures[:-1]:
        first = draw_scene(rng)
        frames = [first] + [replace(draw_scene(rng), height=first.height, width=first.width) for _ in range(3)]
        videos.append({"type": "video", "video": torch.stack(draw(frames)).numpy()})
    content = [*videos, {"type": "image"}, {"type": "text", "text": OTHER_QUESTION}]
    return Question((system_message(other_system(rng)), {"role": "user", "content": content}), pictures[-1:])


def as_fourth_to_eighth(pictures: Pictures, rng: random.Random) -> Question:
    """A picture behind three to seven others, which it will not have before it later."""
    shown = (*(draw_scene(rng) for _ in range(rng.randint(*MANY) - 1)), *pictures)
    return Question(chat(OTHER_QUESTION, len(shown)), shown)


# ---------------------------------------------------------------- what is asked

def anything(question: Question, _: random.Random) -> Question | None:
    return question


def about_several(question: Question, _: random.Random) -> Question | None:
    return question if question.kind in SEVERAL_KINDS else None


def about_one(question: Question, _: random.Random) -> Question | None:
    return question if question.kind in SINGLE_KINDS else None


def behind_many(question: Question, rng: random.Random) -> Question | None:
    """A question about the last of four to eight pictures."""
    if question.kind not in SINGLE_KINDS:
        return None
    pictures = (*(draw_scene(rng) for _ in range(rng.randint(*MANY) - 1)), *question.pictures)
    text = question.messages[0]["content"][-1]["text"]
    return replace(question, pictures=pictures, messages=chat(f"in image {len(pictures)}, {text}", len(pictures)))


@dataclass(frozen=True)
class Experiment:
    """How pictures are first seen, which questions are asked then, and whether keys are turned to their new place."""

    how: Callable[[Pictures, random.Random], Question]
    asked: Callable[[Question, random.Random], Question | None] = anything
    turned: bool = True

    def questions(self, per_kind: int, seed: int) -> list[Question]:
        """Held-out questions of the kinds that the experiment asks."""
        rng = random.Random(f"asked {seed}")
        return [asked for question in builtin_questions(per_kind, seed)
                if (asked := self.asked(question, rng)) is not None]


EXPERIMENTS = {
    "elsewhere": Experiment(elsewhere),
    "elsewhere, keys not turned": Experiment(elsewhere, turned=False),
    "same text": Experiment(same_text),
    "bare": Experiment(bare),
    "other language": Experiment(other_language),
    "earlier turn": Experiment(earlier_turn),
    "other pictures before": Experiment(other_pictures_before, about_several),
    "video before": Experiment(video_before, about_several),
    "other ordinals": Experiment(other_ordinals, about_several),
    "first seen as 4th to 8th": Experiment(as_fourth_to_eighth, about_one),
    "4th to 8th both times": Experiment(other_pictures_before, behind_many)}
assert set(SEVERAL_KINDS) | set(SINGLE_KINDS) < set(KINDS)
