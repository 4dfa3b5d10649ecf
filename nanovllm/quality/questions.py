"""Reads questions about pictures from a file, one JSON object a line."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from nanovllm.quality.shapes import held_out

Message = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What is asked: a chat whose content parts of type "image" stand for `pictures`, in their order."""

    messages: tuple[Message, ...]
    pictures: tuple[Any, ...]       # paths, or scenes that are painted when they are needed
    kind: str = "all"
    answer: str | None = None


def chat(question: str, num_pictures: int, before: str = "", question_first: bool = False) -> tuple[Message, ...]:
    """One user turn: text, pictures, question; or the question before the pictures."""
    pictures = [{"type": "image"}] * num_pictures
    asked = [{"type": "text", "text": question}]
    content = asked + pictures if question_first else pictures + asked
    return ({"role": "user", "content": ([{"type": "text", "text": before}] if before else []) + content},)


def builtin_questions(num_per_kind: int, seed: int = 0) -> Iterator[Question]:
    """Questions about coloured shapes, others for each seed, that `tools/train_shapes_vl.py` never trains on."""
    for asked in held_out(num_per_kind, seed):
        yield Question(chat(asked.question, len(asked.scenes), asked.before, asked.question_first), asked.scenes,
                       asked.kind, asked.answer)


def read_questions(file: str | Path) -> list[Question]:
    """The questions of a JSONL file: `images` (paths, from the file's folder), `question` or `messages` in the form of
    chat templates, and if wanted `before` (text in front of the pictures), `kind` and `answer`.

    Raises ValueError naming file and line for one that lacks something, has an unknown key or names no picture.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"questions {path}: there is no such file; give a JSONL file, or --builtin")
    lines = path.read_text(encoding="utf-8").splitlines()
    questions = [_parse(line, f"{path} line {number}", path.parent)
                 for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ValueError(f"questions {path}: the file is empty; give one JSON object a line")
    return questions


def _parse(line: str, where: str, folder: Path) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): give one object a line") from error
    known = {"images", "question", "messages", "before", "kind", "answer"}
    if not isinstance(entry, dict) or entry.keys() - known:
        raise ValueError(f"{where}: give an object with keys among {sorted(known)}")
    for key in ("question", "before", "kind"):
        if not isinstance(entry.get(key, ""), str):
            raise ValueError(f"{where}: {key}={entry[key]!r}: give a string, or leave it out")
    pictures = _pictures(entry.get("images"), where, folder)
    if ("question" in entry) == ("messages" in entry):
        raise ValueError(f"{where}: give either question or messages")
    if "messages" in entry and "before" in entry:
        raise ValueError(f"{where}: before goes with question; with messages, put the text into them")
    if "messages" in entry and not is_chat(entry["messages"]):
        raise ValueError(f"{where}: messages={entry['messages']!r:.80}: give a list of objects with a role and a "
                         "content, which is a string or a list of objects with a type")
    messages = (tuple(entry["messages"]) if "messages" in entry else
                chat(entry["question"], len(pictures), entry.get("before", "")))
    if (placed := num_image_parts(messages)) != len(pictures):
        raise ValueError(f"{where}: messages have {placed} parts of type image, and images has {len(pictures)}")
    return Question(messages, pictures, entry.get("kind", "all"), _answer(entry.get("answer"), where))


def _pictures(images: Any, where: str, folder: Path) -> tuple[Path, ...]:
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise ValueError(f"{where}: images={images!r}: give a list of paths of at least one picture")
    pictures = tuple(folder / image for image in images)
    for picture in pictures:
        if not picture.is_file():
            raise ValueError(f"{where}: {picture} is no file; paths start at the folder of the questions")
        try:
            Image.open(picture).close()         # reads no more than the header
        except OSError as error:
            raise ValueError(f"{where}: {picture} is no picture ({error})") from error
    return pictures


def _answer(answer: Any, where: str) -> str | None:
    if answer is None:
        return None
    if not isinstance(answer, (str, int, float)) or not words_of(str(answer)):
        raise ValueError(f"{where}: answer={answer!r}: give a word or more, or a number; answers are compared by words")
    return str(answer)


def words_of(text: str) -> list[str]:
    """Words and numbers, whatever case and punctuation."""
    return re.findall(r"\w+", text.casefold())


def is_chat(messages: Any) -> bool:
    """Whether this has the form that chat templates take."""
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str)
        and (isinstance(content := message.get("content"), str)
             or (isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)))
        for message in messages)


def num_image_parts(messages: tuple[Message, ...]) -> int:
    return sum(part.get("type") == "image" for message in messages if isinstance(message["content"], list)
               for part in message["content"])
