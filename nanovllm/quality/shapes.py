"""Invents grids of coloured shapes by seed and asks questions whose answers need the pictures."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "black", "pink")
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
EMPTY = -1
PIXELS_OF_TOKEN = 28
SIDES_IN_TOKENS = (4, 12)               # a picture's sides: 112 to 336 pixels
MIN_CELL = 42                           # pixels, so that a shape is larger than one token
KINDS = ("position", "only", "count", "existence", "relation", "two images", "three images", "which image",
         "question first", "text before")
SINGLE_KINDS = KINDS[:5]
BESIDE = {"right of": (0, 1), "left of": (0, -1), "above": (-1, 0), "below": (1, 0)}


@dataclass(frozen=True)
class Scene:
    """A picture to draw: cells row by row, each EMPTY or colour * len(SHAPES) + shape; sizes in pixels."""

    rows: int
    cols: int
    cells: tuple[int, ...]
    jitter: tuple[tuple[float, float, float], ...]      # per cell: move right, move down, radius; in half cells
    height: int
    width: int
    grey: bool = False                                  # a grey picture of this size instead, with nothing in it

    @property
    def grid(self) -> tuple[int, int, int]:
        """(t, h, w) in patches of 14 pixels."""
        return 1, self.height // 14, self.width // 14

    def filled(self) -> list[int]:
        return [place for place, cell in enumerate(self.cells) if cell != EMPTY]


@dataclass(frozen=True)
class Asked:
    """One question about scenes: what stands before the pictures, the question, the answer in one word."""

    kind: str
    scenes: tuple[Scene, ...]
    question: str
    answer: str
    before: str = ""
    question_first: bool = False


def colour_of(cell: int) -> str:
    return COLOURS[cell // len(SHAPES)]


def shape_of(cell: int) -> str:
    return SHAPES[cell % len(SHAPES)]


def name_of(cell: int) -> str:
    return f"{colour_of(cell)} {shape_of(cell)}"


def a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def draw_scene(rng: random.Random, max_side: int = 4) -> Scene:
    """A scene of 2 x 2 to max_side x max_side cells; about one cell in eight is empty, never a whole row or column,
    since nobody could count those."""
    rows, cols = rng.randint(2, max_side), rng.randint(2, max_side)
    height, width = (PIXELS_OF_TOKEN * rng.randint(max(SIDES_IN_TOKENS[0], -(-cells * MIN_CELL // PIXELS_OF_TOKEN)),
                                                   rng.choice((7, 9, SIDES_IN_TOKENS[1])))
                     for cells in (rows, cols))
    cells = _draw_cells(rng, rows, cols)
    jitter = tuple((rng.uniform(-0.15, 0.15), rng.uniform(-0.15, 0.15), rng.uniform(0.6, 0.84)) for _ in cells)
    return Scene(rows, cols, cells, jitter, height, width)


def _draw_cells(rng: random.Random, rows: int, cols: int) -> tuple[int, ...]:
    while True:
        cells = tuple(EMPTY if rng.random() < 0.12 else rng.randrange(len(COLOURS) * len(SHAPES))
                      for _ in range(rows * cols))
        lines = [cells[row * cols:(row + 1) * cols] for row in range(rows)] + [cells[col::cols] for col in range(cols)]
        if not any(set(line) == {EMPTY} for line in lines):
            return cells


# ---------------------------------------------------------------- questions about one picture

def ask_position(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    if not (places := scene.filled()):
        return None
    place = rng.choice(places)
    row, col = divmod(place, scene.cols)
    where = f"at row {row + 1} column {col + 1}"
    if rng.random() < 0.5:
        return f"what colour is {where}?", colour_of(scene.cells[place])
    return f"what shape is {where}?", shape_of(scene.cells[place])


def ask_only(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """The only thing of a colour, or of a shape."""
    things = [scene.cells[place] for place in scene.filled()]
    by_colour, by_shape = [colour_of(cell) for cell in things], [shape_of(cell) for cell in things]
    found = [(f"what shape is the only {colour} thing?", shape) for colour, shape in zip(by_colour, by_shape)
             if by_colour.count(colour) == 1]
    found += [(f"what colour is the only {shape}?", colour) for colour, shape in zip(by_colour, by_shape)
              if by_shape.count(shape) == 1]
    return rng.choice(found) if found else None


def ask_count(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """Of a colour, of a shape, or of all: each number that occurs is as likely, so that guessing does not pay."""
    things = [scene.cells[place] for place in scene.filled()]
    counts: dict[int, list[str]] = {len(things): ["things"]}
    for names, all_names, noun in ((list(map(colour_of, things)), COLOURS, "{} things"),
                                   (list(map(shape_of, things)), SHAPES, "{} shapes")):
        for name in all_names:
            counts.setdefault(names.count(name), []).append(noun.format(name))
    number = rng.choice(sorted(counts))
    return f"how many {rng.choice(counts[number])} are there?", str(number)


def ask_existence(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    things = {scene.cells[place] for place in scene.filled()}
    if not things:
        return None
    there = rng.random() < 0.5
    absent = [cell for cell in range(len(COLOURS) * len(SHAPES)) if cell not in things]
    cell = rng.choice(sorted(things) if there else absent)
    return f"is there {a(name_of(cell))}?", "yes" if there else "no"


def ask_relation(rng: random.Random, scene: Scene) -> tuple[str, str] | None:
    """Two hops: find a thing that is there once, then look beside it."""
    found = []
    for place in scene.filled():
        if scene.cells.count(scene.cells[place]) == 1:
            row, col = divmod(place, scene.cols)
            for word, (down, right) in BESIDE.items():
                if 0 <= row + down < scene.rows and 0 <= col + right < scene.cols:
                    other = scene.cells[place + down * scene.cols + right]
                    if other != EMPTY:
                        found.append((f"directly {word} the {name_of(scene.cells[place])}?", other))
    if not found:
        return None
    where, other = rng.choice(found)
    if rng.random() < 0.5:
        return f"what colour is {where}", colour_of(other)
    return f"what shape is {where}", shape_of(other)


ASKERS: dict[str, Callable[[random.Random, Scene], tuple[str, str] | None]] = {
    "position": ask_position, "only": ask_only, "count": ask_count, "existence": ask_existence,
    "relation": ask_relation}


# ---------------------------------------------------------------- questions about several, and texts around them

def ask_of_image(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str] | None:
    """A look-up or a search in one of several pictures, which the question numbers."""
    number = rng.randrange(len(scenes))
    asked = ASKERS[rng.choice(("position", "position", "only", "existence"))](rng, scenes[number])
    return asked and (f"in image {number + 1}, {asked[0]}", asked[1])


def ask_which(rng: random.Random, scenes: Sequence[Scene]) -> tuple[str, str] | None:
    """Which picture has a thing that the others do not have."""
    cells = [{scene.cells[place] for place in scene.filled()} for scene in scenes]
    number = rng.randrange(len(scenes))
    alone = cells[number].difference(*(other for i, other in enumerate(cells) if i != number))
    if not alone:
        return None
    return f"which image has {a(name_of(rng.choice(sorted(alone))))}?", str(number + 1)


def ask(rng: random.Random, kind: str, scenes: Sequence[Scene]) -> tuple[str, str] | None:
    """A (question, answer) of a kind about the scenes, or None where they allow none."""
    if kind == "which image":
        return ask_which(rng, scenes)
    if kind in ("two images", "three images"):
        return ask_of_image(rng, scenes)
    if kind in ("question first", "text before"):
        kind = rng.choice(("position", "only", "relation"))
    return ASKERS[kind](rng, scenes[0])


def distracting_text(rng: random.Random, num_sentences: int) -> str:
    """Sentences about other things, full of the words that questions and answers use."""
    def sentence() -> str:
        thing, other = (f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}" for _ in range(2))
        number = rng.randint(2, 9)
        return rng.choice((
            f"yesterday the {thing} was sold for {number} coins.",
            f"my friend likes the {thing} more than the {other}.",
            f"{a(thing)} is not in this picture, she said.", f"there were {number} of them on the table.",
            f"the {thing} stood left of the {other} in row {number}.", "please answer in one word.",
            f"it rained for {number} days and nobody came.", f"he painted {a(thing)} above {a(other)}.",
            "look at the picture and be brief.", f"in column {number} of the old book there was {a(other)}."))
    return " ".join(sentence() for _ in range(num_sentences))


def num_scenes_of(kind: str, rng: random.Random) -> int:
    return {"two images": 2, "three images": 3}.get(kind) or (rng.randint(2, 3) if kind == "which image" else 1)


def ask_one(rng: random.Random, kind: str) -> Asked:
    """A question of a kind about scenes of its own."""
    while True:
        side = 3 if kind == "relation" else 4
        scenes = tuple(draw_scene(rng, side) for _ in range(num_scenes_of(kind, rng)))
        asked = ask(rng, kind, scenes)
        if asked is not None:
            before = distracting_text(rng, rng.randint(3, 12)) if kind == "text before" else ""
            return Asked(kind, scenes, *asked, before=before, question_first=kind == "question first")


def held_out(num_per_kind: int, seed: int = 0) -> Iterator[Asked]:
    """The questions a model is judged on, kinds in turn; the first n of each do not depend on `num_per_kind`."""
    rngs = {kind: random.Random(f"held out {seed} {kind}") for kind in KINDS}
    for _ in range(num_per_kind):
        for kind, rng in rngs.items():
            yield ask_one(rng, kind)


def without_pictures(asked: Asked) -> Asked:
    """The same question beside grey pictures: what can be guessed without looking."""
    return replace(asked, scenes=tuple(replace(scene, grey=True) for scene in asked.scenes))
