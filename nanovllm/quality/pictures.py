"""Paints scenes of coloured shapes, pixel by pixel and all at once, on any device."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.quality.shapes import EMPTY, SHAPES, Scene

RGB = ((220, 30, 30), (30, 150, 50), (40, 70, 220), (240, 210, 40), (130, 40, 160), (245, 140, 20), (20, 20, 20),
       (250, 150, 190))                 # of shapes.COLOURS
MAX_CELLS = 16
WHITE, GREY = 255.0, 128.0


@dataclass(frozen=True)
class SceneTables:
    """Scenes as tensors on one device, a row each."""

    sizes: Tensor           # float32 [scenes, 4]: rows, cols, height, width
    cells: Tensor           # int64 [scenes, MAX_CELLS]
    jitter: Tensor          # float32 [scenes, MAX_CELLS, 3]
    background: Tensor      # float32 [scenes]

    @classmethod
    def of(cls, scenes: Sequence[Scene]) -> SceneTables:
        empty, still = (EMPTY,) * MAX_CELLS, ((0.0, 0.0, 1.0),) * MAX_CELLS
        return cls(
            torch.tensor([(scene.rows, scene.cols, scene.height, scene.width) for scene in scenes]).float(),
            torch.tensor([((() if scene.grey else scene.cells) + empty)[:MAX_CELLS] for scene in scenes]),
            torch.tensor([(scene.jitter + still)[:MAX_CELLS] for scene in scenes]),
            torch.tensor([GREY if scene.grey else WHITE for scene in scenes]))

    def to(self, device: torch.device | str) -> SceneTables:
        return SceneTables(*(getattr(self, name).to(device, non_blocking=True)
                             for name in ("sizes", "cells", "jitter", "background")))


def paint(tables: SceneTables, scene: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """float32 [..., 3], whole numbers from 0 to 255: the colour of pixel (y, x) of a scene; all int64 of one shape."""
    rows, cols, height, width = tables.sizes[scene].unbind(-1)
    down, right = (y + 0.5) / height * rows, (x + 0.5) / width * cols
    place = (down.floor() * cols + right.floor()).long()
    cell = tables.cells[scene, place]
    move_x, move_y, radius = tables.jitter[scene, place].unbind(-1)
    # Shapes keep their proportions in cells that are not square: the shorter side of the cell is 2.
    cell_height, cell_width = height / rows, width / cols
    half = torch.minimum(cell_height, cell_width) / 2
    u = (((right % 1) - 0.5) * cell_width / half - move_x) / radius
    v = (((down % 1) - 0.5) * cell_height / half - move_y) / radius
    inside = _inside(u, v).gather(0, (cell % len(SHAPES))[None])[0] & (cell != EMPTY)
    palette = torch.tensor(RGB, dtype=torch.float32, device=scene.device)
    colour = palette[(cell // len(SHAPES)).clamp(min=0)]
    return torch.where(inside[..., None], colour, tables.background[scene][..., None])


def _inside(u: Tensor, v: Tensor) -> Tensor:
    """bool [shapes, ...] in the order of SHAPES: whether (u right, v down), in radii from the centre, lies inside."""
    wide, thin = torch.maximum(u.abs(), v.abs()), torch.minimum(u.abs(), v.abs())
    corner = 2 * math.pi / 5
    angle = (torch.atan2(u, -v) + corner / 2) % corner - corner / 2         # from the nearest of the star's tips
    along, aside = torch.hypot(u, v) * angle.cos(), torch.hypot(u, v) * angle.sin().abs()
    dent_along, dent_aside = 0.42 * math.cos(corner / 2), 0.42 * math.sin(corner / 2)
    star = (1 - along) * dent_aside > aside * (1 - dent_along)
    return torch.stack((
        u.square() + v.square() < 0.85, wide < 0.8, (v < 0.8) & (u.abs() < (v + 0.9) * 0.55), star,
        (thin < 0.28) & (wide < 0.95), u.abs() + v.abs() < 1))


def draw(scenes: Sequence[Scene]) -> list[Tensor]:
    """Each scene as uint8 [height, width, 3]."""
    tables = SceneTables.of(scenes)
    pictures = []
    for index, scene in enumerate(scenes):
        y, x = torch.meshgrid(torch.arange(scene.height), torch.arange(scene.width), indexing="ij")
        pictures.append(paint(tables, torch.full_like(y, index), y, x).to(torch.uint8))
    return pictures
