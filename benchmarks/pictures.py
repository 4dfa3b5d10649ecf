"""Draws the pictures that the scripts show to a model."""
from __future__ import annotations

import random

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "orange", "purple", "black")


def draw_shapes(width: int, height: int, seed: int = 0, num_shapes: int = 5) -> Image.Image:
    """Circles, squares and triangles of random place, size and colour on white; one picture for each seed."""
    rng = random.Random(seed)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(num_shapes):
        radius = rng.randint(min(width, height) // 12, min(width, height) // 5)
        x, y = rng.randint(radius, width - radius), rng.randint(radius, height - radius)
        box, colour = (x - radius, y - radius, x + radius, y + radius), rng.choice(COLOURS)
        kind = rng.choice(("circle", "square", "triangle"))
        if kind == "circle":
            draw.ellipse(box, fill=colour)
        elif kind == "square":
            draw.rectangle(box, fill=colour)
        else:
            draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    return picture
