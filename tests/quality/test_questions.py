"""Questions about shapes are right about their scenes, and files of questions are read or refused by line."""
from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nanovllm.quality.pictures import GREY, RGB, draw
from nanovllm.quality.questions import builtin_questions, read_questions
from nanovllm.quality.shapes import (
    COLOURS,
    EMPTY,
    KINDS,
    SHAPES,
    Scene,
    ask,
    ask_count,
    ask_existence,
    ask_only,
    ask_position,
    ask_relation,
    draw_scene,
    held_out,
    without_pictures,
)

RED_STAR, BLUE_SQUARE, BLUE_STAR = (COLOURS.index(colour) * len(SHAPES) + SHAPES.index(shape) for colour, shape in (
    ("red", "star"), ("blue", "square"), ("blue", "star")))
STILL = ((0.0, 0.0, 0.8),) * 4
SCENE = Scene(2, 2, (RED_STAR, BLUE_SQUARE, EMPTY, BLUE_STAR), STILL, 112, 168)
ANSWERS = {
    ask_position: {"what colour is at row 1 column 2?": "blue", "what shape is at row 2 column 2?": "star",
                   "what shape is at row 1 column 1?": "star"},
    ask_only: {"what shape is the only red thing?": "star", "what colour is the only square?": "blue"},
    ask_count: {"how many blue things are there?": "2", "how many star shapes are there?": "2",
                "how many things are there?": "3", "how many green things are there?": "0"},
    ask_existence: {"is there a red star?": "yes", "is there a red square?": "no", "is there an orange star?": "no"},
    ask_relation: {"what colour is directly right of the red star?": "blue",
                   "what shape is directly above the blue star?": "square",
                   "what shape is directly below the blue square?": "star"},
}


@pytest.mark.parametrize("asker", ANSWERS, ids=lambda asker: asker.__name__)
def test_answers_are_those_of_the_scene(asker) -> None:
    asked = dict(asker(random.Random(seed), SCENE) for seed in range(600))
    assert asked.keys() >= ANSWERS[asker].keys()
    assert {question: asked[question] for question in ANSWERS[asker]} == ANSWERS[asker]


def test_questions_about_several_images_name_the_right_one() -> None:
    other = Scene(2, 2, (BLUE_SQUARE,) * 4, STILL, 112, 112)
    asked = dict(filter(None, (ask(random.Random(seed), "two images", (SCENE, other)) for seed in range(500))))
    assert asked["in image 1, what colour is at row 1 column 1?"] == "red"
    assert asked["in image 2, what colour is at row 1 column 1?"] == "blue"
    which = {ask(random.Random(seed), "which image", (SCENE, other)) for seed in range(100)} - {None}
    assert which == {("which image has a red star?", "1"), ("which image has a blue star?", "1")}


def test_held_out_questions_are_seeded_and_do_not_depend_on_their_number() -> None:
    few, many = list(held_out(2)), list(held_out(5))
    assert few == many[:len(few)] and [asked.kind for asked in few] == [*KINDS] * 2
    assert few != list(held_out(2, seed=1))
    assert all(asked.before for asked in many if asked.kind == "text before")


def test_every_row_and_column_shows_something() -> None:
    for seed in range(300):
        scene = draw_scene(random.Random(seed))
        cells = np.array(scene.cells).reshape(scene.rows, scene.cols) != EMPTY
        assert cells.any(0).all() and cells.any(1).all()
        assert scene.height % 28 == scene.width % 28 == 0 and 112 <= scene.height <= 336


def test_pictures_show_the_cells() -> None:
    picture, grey = draw([SCENE, *without_pictures(next(held_out(1))).scenes])
    assert picture.dtype == torch.uint8 and picture.shape == (112, 168, 3)
    centres = [tuple(picture[28 + 56 * row, 42 + 84 * col].tolist()) for row in range(2) for col in range(2)]
    red, blue, white = RGB[COLOURS.index("red")], RGB[COLOURS.index("blue")], (255,) * 3
    assert centres == [red, blue, white, blue]
    assert (grey == GREY).all()


def test_builtin_questions_carry_their_pictures() -> None:
    for question in islice(builtin_questions(1), len(KINDS)):
        [message] = question.messages
        assert sum(part["type"] == "image" for part in message["content"]) == len(question.pictures) > 0
        first = message["content"][0]["type"]
        assert first == ("text" if question.kind in ("question first", "text before") else "image")


def write(folder: Path, **entry: object) -> Path:
    Image.new("RGB", (56, 56)).save(folder / "a.png")
    file = folder / "questions.jsonl"
    file.write_text(json.dumps({"images": ["a.png"]} | entry) + "\n")
    return file


def test_a_file_of_questions(tmp_path: Path) -> None:
    [question] = read_questions(write(tmp_path, question="why?", before="so.", kind="deep", answer=42))
    assert (question.kind, question.answer, question.pictures) == ("deep", "42", (tmp_path / "a.png",))
    assert [part.get("text") for part in question.messages[0]["content"]] == ["so.", None, "why?"]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why?"}]}]
    assert read_questions(write(tmp_path, messages=messages))[0].messages == tuple(messages)


@pytest.mark.parametrize("entry, match", [
    ({}, "line 1: give either question or messages"), (dict(question="?", images=[]), "images="),
    (dict(question="?", images=["b.png"]), "b.png is no file"), (dict(question="?", typo=1), "keys among"),
    (dict(messages=[{"role": "user", "content": "hi"}]), "0 parts of type image"),
    (dict(messages=[], before="x"), "before goes with question"),
    (dict(question="?", images=[1]), "images="), (dict(question="?", images=["questions.jsonl"]), "is no picture"),
    (dict(question=5), "question=5: give a string"), (dict(question="?", kind=[1]), "kind="),
    (dict(messages="hi"), "messages='hi'"), (dict(messages=[1]), "messages="),
    (dict(messages=[{"role": "user"}]), "messages="),
    (dict(messages=[{"role": "user", "content": ["hi"]}]), "messages="),
    (dict(question="?", answer="?!"), "compared by words"), (dict(question="?", answer=["a"]), "answer="),
])
def test_wrong_questions_are_refused(tmp_path: Path, entry: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_questions(write(tmp_path, **entry))
    with pytest.raises(ValueError, match="no such file"):
        read_questions(tmp_path / "other.jsonl")
