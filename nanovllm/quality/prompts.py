"""Turns questions into what `LLM.generate` takes, and their pictures into prompts of another kind."""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoProcessor

from nanovllm.model_config import ModelConfig
from nanovllm.quality.pictures import draw
from nanovllm.quality.questions import Message, Question, chat
from nanovllm.quality.shapes import Scene

Inputs = Mapping[str, Any]
FIRST_SEEN = ("elsewhere", "bare")
SENTENCES = (
    "This is another conversation, and what follows has nothing to do with what will be asked later on.",
    "Look at what is shown, from left to right and from top to bottom, and say in a few plain words what it is.",
    "Do not guess, do not invent anything, and do not repeat yourself.",
    "Whoever reads your answer has not seen what you see, and may never see it.",
    "If something is cut off, too small or too dark to be told, say so and go on with the next thing.",
    "Numbers are written as figures, names as they are usually written, and nothing is abbreviated.")
OTHER_QUESTION = "what is shown here?"


def other_system(rng: random.Random) -> str:
    """Six to eight sentences, which move the pictures of most prompts by more than a hundred positions."""
    return " ".join(rng.choice(SENTENCES) for _ in range(rng.randint(6, 8)))


def system_message(text: str) -> Message:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def behind(system: str, num_pictures: int) -> tuple[Message, ...]:
    """Pictures behind a system text, before another question."""
    return (system_message(system), *chat(OTHER_QUESTION, num_pictures))


class Prompts:
    """A model's processor, and the prompts it makes."""

    def __init__(self, config: ModelConfig) -> None:
        self.processor = AutoProcessor.from_pretrained(config.path)
        self.picture_text = "".join(self.processor.tokenizer.convert_ids_to_tokens(
            [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]))

    def asking(self, question: Question) -> Inputs:
        """The question itself."""
        return self._chat(question.messages, open_pictures(question.pictures))

    def showing(self, question: Question, first_seen: str, rng: random.Random) -> Inputs:
        """The same pictures in the same order: "elsewhere", behind a long system text that `rng` draws and before
        another question, or "bare", without a chat around them."""
        pictures = open_pictures(question.pictures)
        if first_seen == "bare":
            text = self.picture_text * len(pictures) + OTHER_QUESTION
            return self.processor(text=[text], images=pictures, return_tensors="pt")
        return self._chat(behind(other_system(rng), len(pictures)), pictures)

    def _chat(self, messages: Sequence[Message], pictures: list[Image.Image]) -> Inputs:
        waiting = iter(pictures)
        filled = [message | {"content": [
            {"type": "image", "image": next(waiting)} if part.get("type") == "image" else part
            for part in message["content"]]} if isinstance(message["content"], list) else message
            for message in messages]
        return self.processor.apply_chat_template(
            filled, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")


def open_pictures(pictures: Sequence[Any]) -> list[Image.Image]:
    """Pictures from paths and scenes."""
    opened = []
    for picture in pictures:
        if isinstance(picture, Scene):
            opened.append(Image.fromarray(draw([picture])[0].numpy()))
        else:
            with Image.open(Path(picture)) as image:
                opened.append(image.convert("RGB"))
    return opened
