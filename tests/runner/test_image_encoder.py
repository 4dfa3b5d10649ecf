"""Images grouped into calls of the vision tower, and the time of a call shared by patches."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.plan import ImageEncode
from nanovllm.runner.image_encoder import encode_images

CPU = torch.device("cpu")


class MeanOfFour:
    """A tower that merges four patches into their mean and notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int, int]]] = []
        self.pixel_dtype = torch.float32

    def encode_images(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        assert len(patches) == sum(t * h * w for t, h, w in grids)
        self.calls.append(list(grids))
        return patches.float().view(-1, 4, patches.shape[1]).mean(1)


def image(key: int, grid: tuple[int, int, int], seq_id: int = 0, as_array: bool = False) -> ImageEncode:
    pixels = torch.randn(grid[0] * grid[1] * grid[2], 6, generator=torch.Generator().manual_seed(key))
    return ImageEncode(key, grid, pixels.numpy() if as_array else pixels, None, seq_id)


def test_images_share_calls_up_to_the_limit_and_a_larger_one_is_alone():
    grids = [(1, 4, 4), (1, 2, 4), (2, 4, 4), (1, 8, 8), (1, 2, 2)]
    model = MeanOfFour()
    images = [image(key, grid, as_array=key % 2 == 1) for key, grid in enumerate(grids)]
    encoded = encode_images(model, images, 40, CPU)
    assert model.calls == [grids[:2], grids[2:3], grids[3:4], grids[4:]]
    for each, rows in zip(images, encoded.rows):
        assert torch.equal(rows, torch.as_tensor(each.pixels).view(-1, 4, 6).mean(1)), "rows of a call split wrongly"


def test_the_time_of_a_call_is_shared_by_patches():
    encoded = encode_images(MeanOfFour(), [image(0, (1, 4, 4), 5), image(1, (1, 4, 12), 7), image(2, (1, 4, 16), 7)],
                            64, CPU)
    first, second = (timer.seconds() for timer, _ in encoded.calls)
    assert first > 0 and second > 0
    seconds = encoded.seconds_by_seq()
    assert seconds == pytest.approx({5: first / 4, 7: first * 3 / 4 + second})


def test_no_image_no_call():
    model = MeanOfFour()
    encoded = encode_images(model, [], 64, CPU)
    assert model.calls == [] and encoded.rows == [] and encoded.seconds_by_seq() == {}


def test_read_only_pixels_are_not_written():
    pixels = np.random.default_rng(0).random((4, 6), np.float32)
    copy = pixels.copy()
    encode_images(MeanOfFour(), [ImageEncode(0, (1, 2, 2), pixels, None, 0)], 64, CPU)
    assert np.array_equal(pixels, copy)
