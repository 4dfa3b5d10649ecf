"""The identity of pixels: a 128-bit digest of all of them, at memory speed."""
from __future__ import annotations

from typing import Any

from nanovllm.image.items import Grid


def content_hash(pixels: Any, grid: Grid) -> int:
    raise NotImplementedError


def fingerprint(pixels: Any, grid: Grid) -> int:
    raise NotImplementedError
