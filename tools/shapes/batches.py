"""Packs training sequences, their pictures and what is asked of them into arrays of fixed shapes."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from nanovllm.quality.pictures import SceneTables
from nanovllm.quality.shapes import EMPTY, KINDS, SINGLE_KINDS, Asked, Scene, ask, distracting_text, draw_scene
from nanovllm.quality.shapes import num_scenes_of as num_scenes_of_kind
from tests.checkpoints import IMAGE_PAD, TURN_END, TURN_START, VISION_END, VISION_START

TEXT_ROW, VISION_ROW = 1024, 576        # tokens and patches of one row; the largest picture has 576 patches
WINDOW = 8                              # patches a side of a window of the vision tower
MAX_CELLS = 4                           # a side
IGNORED = -100
# How often a sequence is made for a kind.
SHARES = {"position": 1.0, "only": 1.0, "count": 1.0, "existence": 0.7, "relation": 3.0, "two images": 1.3,
          "three images": 1.0, "which image": 0.8, "question first": 1.2, "text before": 1.0}


@dataclass(frozen=True)
class Conversation:
    """One sequence: pictures, then turns about them; the kind of each turn's question."""

    scenes: tuple[Scene, ...]
    turns: tuple[Asked, ...]
    system: str


def conversation_of(asked: Asked, system: str = "be helpful") -> Conversation:
    return Conversation(asked.scenes, (asked,), system)


def draw_conversation(rng: random.Random) -> Conversation:
    """A conversation of one to eight turns; a question before the pictures stands alone."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    scenes = tuple(draw_scene(rng, rng.choice((2, 3, 3) if kind == "relation" else (2, 3, 4)))
                   for _ in range(num_scenes_of_kind(kind, rng)))
    kinds = [kind] if kind == "question first" else [kind] * rng.randint(1, 4)
    if len(scenes) == 1 and kind != "question first":
        kinds += rng.choices(SINGLE_KINDS, [1, 1, 1, 0.5, 2], k=rng.randint(0, 4))
    if len(scenes) > 1:
        kinds += rng.choices(("which image", "two images" if len(scenes) == 2 else "three images"), k=rng.randint(0, 4))
    before = distracting_text(rng, rng.randint(2, 12)) if kind == "text before" else ""
    turns = [Asked(kind, scenes, *asked, before=before, question_first=kind == "question first")
             for kind in kinds if (asked := ask(rng, kind, scenes)) is not None]
    system = "be helpful" if rng.random() < 0.5 else distracting_text(rng, rng.randint(0, 15))
    return Conversation(scenes, tuple(turns), system)


def text_of(conversation: Conversation) -> str:
    """The rendered chat, one placeholder a picture, with the answers in it."""
    pictures = f"{VISION_START}{IMAGE_PAD}{VISION_END}" * len(conversation.scenes)
    text = f"{TURN_START}system\n{conversation.system}{TURN_END}\n"
    for number, turn in enumerate(conversation.turns):
        content = turn.question
        if number == 0:
            content = turn.before + (turn.question + pictures if turn.question_first else pictures + turn.question)
        text += f"{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n{turn.answer}{TURN_END}\n"
    return text


@dataclass
class Encoded:
    """A conversation as token ids with every placeholder in place, and what each token is."""

    conversation: Conversation
    ids: list[int]
    positions: list[tuple[int, int, int]]
    targets: list[int]                  # the next token where it is of an answer, else IGNORED
    kinds: list[int]                    # of the question whose answer's first token comes next, else IGNORED
    starts: list[int]                   # of each picture's placeholders


class Encoder:
    """Conversations to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pad, self.end = (tokenizer.get_vocab()[token] for token in (IMAGE_PAD, TURN_END))
        self.opening: list[int] = tokenizer(f"{TURN_START}assistant\n")["input_ids"]       # of an answer

    def __call__(self, conversation: Conversation) -> Encoded:
        out = Encoded(conversation, [], [], [], [], [])
        scenes, turns = iter(conversation.scenes), iter(conversation.turns)
        position, answering = 0, False
        for token in self.tokenizer(text_of(conversation))["input_ids"]:
            if answering or out.ids[-len(self.opening):] == self.opening:
                out.targets[-1] = token
                out.kinds[-1] = IGNORED if answering else KINDS.index(next(turns).kind)
                answering = token != self.end
            if token == self.pad:
                places = offsets(*(side // 2 for side in next(scenes).grid[1:]))
                out.starts.append(len(out.ids))
                out.positions += [(position, position + row, position + col) for row, col in places]
                position += max(places[-1]) + 1
            else:
                places = ((0, 0),)
                out.positions.append((position,) * 3)
                position += 1
            out.ids += [token] * len(places)
            out.targets += [IGNORED] * len(places)
            out.kinds += [IGNORED] * len(places)
        return out


@cache
def offsets(rows: int, cols: int) -> tuple[tuple[int, int], ...]:
    return tuple((row, col) for row in range(rows) for col in range(cols))


@cache
def patch_places(rows: int, cols: int) -> np.ndarray:
    """int64 [rows * cols, 2]: row and column of each patch in the order of the processor, squares of four together."""
    return np.array([(row + y, col + x) for row in range(0, rows, 2) for col in range(0, cols, 2)
                     for y in range(2) for x in range(2)])


def middles(scene: Scene) -> Iterator[int]:
    """The merged row of a picture in which the middle of each cell lies, cell by cell."""
    for place in range(len(scene.cells)):
        y, x = ((index + 0.5) * side / count / 28 for index, side, count in zip(
            divmod(place, scene.cols), (scene.height, scene.width), (scene.rows, scene.cols)))
        yield int(y) * (scene.grid[2] // 2) + int(x)


@dataclass
class Batch:
    """Rows of packed sequences [rows, TEXT_ROW] and rows of packed pictures [vision rows, VISION_ROW]."""

    ids: Tensor             # int64 [rows, TEXT_ROW]
    positions: Tensor       # int64 [rows, TEXT_ROW, 3]
    sequence: Tensor        # int64 [rows, TEXT_ROW]: number of the sequence in the row; -1: empty
    source: Tensor          # int64 [rows, TEXT_ROW]: merged row of the vision rows in place of the token; -1: none
    targets: Tensor
    kinds: Tensor
    spot: Tensor            # int64 [rows, TEXT_ROW]: row * MAX_CELLS + column of the cell whose middle the token shows
    scene: Tensor           # int64 [vision rows, VISION_ROW]; -1: empty
    window: Tensor          # int64 [vision rows, VISION_ROW]: scene and window in one number
    place: Tensor           # int64 [vision rows, VISION_ROW, 2]
    cell: Tensor            # int64 [vision rows, VISION_ROW // 4]: what lies at the middle of a merged patch
    scenes: SceneTables

    def to(self, device: torch.device | str) -> Batch:
        tensors = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if name != "scenes"}
        return Batch(**tensors, scenes=self.scenes.to(device))


@dataclass
class Packer:
    """Fills the rows of a batch, sequence by sequence, until one does not fit."""

    num_rows: int
    num_vision_rows: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    scenes: list[Scene] = field(default_factory=list)

    def __post_init__(self) -> None:
        text, vision = (self.num_rows, TEXT_ROW), (self.num_vision_rows, VISION_ROW)
        for name, shape, value in (("ids", text, 0), ("positions", (*text, 3), 0), ("sequence", text, -1),
                                   ("source", text, -1), ("targets", text, IGNORED), ("kinds", text, IGNORED),
                                   ("spot", text, IGNORED), ("scene", vision, -1), ("window", vision, -1),
                                   ("place", (*vision, 2), 0), ("cell", (vision[0], vision[1] // 4), IGNORED)):
            self.arrays[name] = np.full(shape, value, np.int64)
        self.text_used, self.vision_used = [0] * self.num_rows, [0] * self.num_vision_rows

    def add(self, encoded: Encoded) -> bool:
        """Whether there was room."""
        before = self.vision_used.copy()
        rows = [self._take(self.vision_used, VISION_ROW, scene.grid[1] * scene.grid[2])
                for scene in encoded.conversation.scenes]
        taken = None if None in rows else self._take(self.text_used, TEXT_ROW, len(encoded.ids))
        if taken is None:
            self.vision_used = before
            return False
        row, start = taken
        here = slice(start, start + len(encoded.ids))
        for name in ("ids", "positions", "targets", "kinds"):
            self.arrays[name][row, here] = getattr(encoded, name)
        self.arrays["sequence"][row, here] = start
        for scene, place, offset in zip(encoded.conversation.scenes, rows, encoded.starts):
            assert place is not None
            num_merged = self._add_scene(scene, *place)
            first = (place[0] * VISION_ROW + place[1]) // 4
            shown = start + offset
            self.arrays["source"][row, shown:shown + num_merged] = range(first, first + num_merged)
            if not scene.grey:
                for cell, merged in enumerate(middles(scene)):
                    self.arrays["spot"][row, shown + merged] = cell // scene.cols * MAX_CELLS + cell % scene.cols
        return True

    @staticmethod
    def _take(used: list[int], size: int, length: int) -> tuple[int, int] | None:
        """(row, start) of the fullest row with room for `length`."""
        fitting = [(filled, row) for row, filled in enumerate(used) if filled + length <= size]
        if not fitting:
            return None
        start, row = max(fitting)
        used[row] += length
        return row, start

    def _add_scene(self, scene: Scene, row: int, start: int) -> int:
        places = patch_places(*scene.grid[1:])
        here = slice(start, start + len(places))
        number = len(self.scenes)
        self.scenes.append(scene)
        self.arrays["scene"][row, here], self.arrays["place"][row, here] = number, places
        self.arrays["window"][row, here] = number * 1024 + places[:, 0] // WINDOW * 32 + places[:, 1] // WINDOW
        if not scene.grey:
            for cell, merged in zip(scene.cells, middles(scene)):
                self.arrays["cell"][row, start // 4 + merged] = 0 if cell == EMPTY else cell + 1
        return len(places) // 4

    def batch(self) -> Batch:
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return Batch(**tensors, scenes=SceneTables.of(self.scenes))


def batches(encoder: Callable[[Conversation], Encoded], num_rows: int, num_vision_rows: int,
            seed: str) -> Iterator[Batch]:
    """Batches without end; the same for the same seed."""
    rng = random.Random(seed)
    waiting = encoder(draw_conversation(rng))
    while True:
        packer = Packer(num_rows, num_vision_rows)
        while packer.add(waiting):
            waiting = encoder(draw_conversation(rng))
        yield packer.batch()


def batches_of(encoder: Callable[[Conversation], Encoded], conversations: Sequence[Conversation], num_rows: int,
               num_vision_rows: int) -> list[Batch]:
    """All of the conversations, in as many batches as they need."""
    packers = [Packer(num_rows, num_vision_rows)]
    for encoded in map(encoder, conversations):
        if not packers[-1].add(encoded):
            packers.append(Packer(num_rows, num_vision_rows))
            assert packers[-1].add(encoded), "a conversation is longer than a row"
    return [packer.batch() for packer in packers]
