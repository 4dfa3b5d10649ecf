"""One image or video of a prompt, as every room above passes it on."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

Grid = tuple[int, int, int]    # (t, h, w) in patches


@dataclass(slots=True)
class ImageItem:
    """An image or video and the placeholder range it fills; `inputs.identify` sets the keys, `None` until then."""

    key: Hashable              # of its encoder rows: ("content", salt, digest, grid) or ("caller", salt, int, grid)
    kv_key: Hashable           # of its KV rows: key; for a video (key, time_interval), since time bends its positions
    start: int                 # its placeholders are [start, stop) of the prompt's ids
    stop: int
    grid: Grid
    is_video: bool
    pixels: Any | None         # CPU tensor or array [t * h * w, patch_dim], a view of what the caller gave
    time_interval: float = 0.0         # positions from one temporal grid to the next: seconds * tokens_per_second
    caller_hash: int | None = None     # the name the caller gave it in image_hashes
    fingerprint: int | None = None     # of the pixels beside such a name: the same name with another one is a miss

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def count_tokens(grid: Grid, merge_size: int) -> int:
    """Number of placeholders and of encoder rows of `grid`: merge_size x merge_size patches become one."""
    t, h, w = grid
    return t * (h // merge_size) * (w // merge_size)
