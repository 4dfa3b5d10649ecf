"""Prompts of token ids and random pictures, as tests hand them to the engine, to the oracle and to transformers."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import IMAGE_PAD, VIDEO_PAD, VISION_END, VISION_START, make_tokenizer

PATCH, MERGE, PATCH_DIM = 14, 2, 3 * 2 * 14 * 14
TOKENIZER = make_tokenizer()
START, END, IMAGE, VIDEO = TOKENIZER.convert_tokens_to_ids([VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD])
NUM_TEXT_IDS = int(min([*TOKENIZER.all_special_ids, START]))       # ids below are plain text


@dataclass(frozen=True, eq=False)
class Picture:
    """A still, or a video if `seconds` (from one temporal grid to the next) is given; grid (t, h, w) in patches."""

    grid: tuple[int, int, int]
    pixels: Tensor              # [t * h * w, patch_dim], in the processor's order
    seconds: float | None = None

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid) // MERGE**2


def picture(height: int, width: int, seed: int = 0) -> Picture:
    """A still of `height` x `width` pixels, multiples of 28."""
    return _random((1, height // PATCH, width // PATCH), None, seed)


def video(frames: int, height: int, width: int, seconds: float, seed: int = 0) -> Picture:
    """A video of `frames` temporal grids."""
    return _random((frames, height // PATCH, width // PATCH), seconds, seed)


def _random(grid: tuple[int, int, int], seconds: float | None, seed: int) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    return Picture(grid, torch.randn(math.prod(grid), PATCH_DIM, generator=generator), seconds)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids with every picture expanded to its placeholders, and the pictures by where these start."""

    token_ids: list[int]
    pictures: list[tuple[int, Picture]]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def mm_inputs(self) -> dict[str, Any] | None:
        """What a processor would return beside the ids."""
        stills = [p for _, p in self.pictures if p.seconds is None]
        videos = [p for _, p in self.pictures if p.seconds is not None]
        inputs: dict[str, Any] = {}
        if stills:
            inputs |= dict(pixel_values=torch.cat([p.pixels for p in stills]),
                           image_grid_thw=torch.tensor([p.grid for p in stills]))
        if videos:
            inputs |= dict(pixel_values_videos=torch.cat([p.pixels for p in videos]),
                           video_grid_thw=torch.tensor([p.grid for p in videos]),
                           second_per_grid_ts=[p.seconds for p in videos])
        return inputs or None


def prompt(*parts: Sequence[int] | Picture, marks: bool = True) -> Prompt:
    """Text ids and pictures in the order given; with `marks` each picture stands between its start and end mark."""
    ids: list[int] = []
    pictures: list[tuple[int, Picture]] = []
    for part in parts:
        if isinstance(part, Picture):
            ids += [START] * marks
            pictures.append((len(ids), part))
            ids += [IMAGE if part.seconds is None else VIDEO] * part.num_tokens + [END] * marks
        else:
            ids += part
    return Prompt(ids, pictures)


def text(num_tokens: int, seed: int = 0) -> list[int]:
    """Random ids of plain text."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(NUM_TEXT_IDS, (num_tokens,), generator=generator).tolist()
