"""M-RoPE positions of a whole prompt, in one pass without a per-token loop."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm.image.items import ImageItem


def mrope_positions(
    num_tokens: int, items: Sequence[ImageItem], merge_size: int
) -> tuple[NDArray[np.int64], int]:
    """Positions of a prompt of `num_tokens` ids whose images and videos are `items`, in the order they stand in it.

    Text counts up by one on all axes. An image or video that starts at position p has h and w at p + row and
    p + column of its merged grid, and t at p + floor(index * time_interval) of its temporal grid; a still has one.
    Text goes on at 1 + the largest position on any axis (the published Qwen2.5-VL rule).

    Returns positions [3, num_tokens] (axes t, h, w) and delta: token `i` behind the prompt has position `i + delta`.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    index = 0          # next token to place
    position = 0       # where it goes
    for item in items:
        position = _place_text(positions, index, item.start, position)
        position = _place_grid(positions, item, merge_size, position)
        index = item.stop
    position = _place_text(positions, index, num_tokens, position)
    return positions, position - num_tokens


def _place_text(positions: NDArray[np.int64], start: int, stop: int, position: int) -> int:
    """Writes the text tokens [start, stop) from `position` on; returns the position behind them."""
    positions[:, start:stop] = np.arange(position, position + stop - start)
    return position + stop - start


def _place_grid(positions: NDArray[np.int64], item: ImageItem, merge_size: int, position: int) -> int:
    """Writes the tokens of `item`, which starts at `position`; returns the position behind it."""
    t, h, w = item.grid[0], item.grid[1] // merge_size, item.grid[2] // merge_size
    # floor comes last, in float: 0.5 s a grid at 1 token a second is 0, 0, 1, 1, not 0, 0, 0, 0
    frames = np.floor(np.arange(t) * item.time_interval).astype(np.int64)
    axes = (frames[:, None, None], np.arange(h)[:, None], np.arange(w))
    for axis, offsets in enumerate(axes):
        positions[axis, item.start:item.stop].reshape(t, h, w)[...] = position + offsets
    return position + 1 + max(int(frames[-1]), h - 1, w - 1)
