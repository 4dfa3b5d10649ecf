"""Steps with images, encoded, cached, cut into chunks or moved, against one dense forward pass of transformers."""
from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from nanovllm.engine.model_runner import ModelRunner
from nanovllm.plan import ImageEncode, ImageRows, IntArray, KVCopy
from tests.checkpoints import make_qwen2_5_vl
from tests.engine.step_plans import DEVICES, Sequences, check, make_runner

GRIDS = [(1, 8, 12), (1, 4, 4), (1, 10, 4)]
ROWS = [t * h * w // 4 for t, h, w in GRIDS]


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


def image_sequences(runner: ModelRunner, prompts: Sequence[Sequence[int | str]], seed: int = 0) -> Sequences:
    """Prompts of text lengths and images: an int is that many random ids, "i" stands for image i of GRIDS."""
    config, rng = runner.config.model_config, random.Random(seed)
    all_ids, all_positions = [], []
    for prompt in prompts:
        ids: list[int] = []
        columns: list[IntArray] = []
        place = 0
        for part in prompt:
            if isinstance(part, str):
                _, h, w = GRIDS[int(part)]
                y, x = np.divmod(np.arange(ROWS[int(part)]), w // 2)
                ids += [config.image_token_id] * len(y)
                columns.append(place + np.stack((0 * y, y, x)))
                place += max(h, w) // 2
            else:
                ids += [rng.randrange(250) for _ in range(part)]
                columns.append(np.tile(np.arange(place, place + part), (3, 1)))
                place += part
        all_ids.append(ids)
        all_positions.append(np.concatenate(columns, axis=1))
    return Sequences(all_ids, all_positions)


def pixels_of(image: int) -> Tensor:
    t, h, w = GRIDS[image]
    return torch.randn(t * h * w, 1176, generator=torch.Generator().manual_seed(image))


def image_logits(path: Any, sequences: Sequences, seq: int, images: Sequence[int]) -> Tensor:
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return reference(
            input_ids=torch.from_numpy(sequences.ids[seq])[None], pixel_values=torch.cat([*map(pixels_of, images)]),
            image_grid_thw=torch.tensor([GRIDS[i] for i in images]),
            position_ids=torch.from_numpy(sequences.positions[seq])[:, None]).logits[0]


def encode(runner: ModelRunner, image: int, seq_id: int, cached: bool) -> ImageEncode:
    blocks = tuple(runner.encoder_cache.allocate(image, ROWS[image])) if cached else None
    return ImageEncode(image, GRIDS[image], pixels_of(image), blocks, seq_id)


def rows_of(encoded: ImageEncode, first: int, stop: int, target: int) -> ImageRows:
    return ImageRows(encoded.key, ROWS[encoded.key], encoded.block_ids, first, stop, target)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", [True, False])
def test_images_of_two_requests_in_one_step(qwen2_5_vl, cached, device):
    runner = make_runner(qwen2_5_vl, device=device)
    sequences = image_sequences(runner, [[5, "0", 3, "1", 4], [2, "2", 6]])
    images = [encode(runner, image, seq_id, cached) for image, seq_id in ((0, 70), (1, 70), (2, 71))]
    first = len(sequences.ids[0])
    rows = (rows_of(images[0], 0, 24, 5), rows_of(images[1], 0, 4, 32), rows_of(images[2], 0, 10, first + 2))
    plan = sequences.plan([(0, 0, first), (1, 0, 18)], encodes=tuple(images), image_rows=rows)
    result = runner.execute(plan)
    check(result, 0, image_logits(qwen2_5_vl, sequences, 0, [0, 1])[-1])
    check(result, 1, image_logits(qwen2_5_vl, sequences, 1, [2])[-1])
    assert set(result.encode_seconds) == {70, 71} and min(result.encode_seconds.values()) > 0
    assert result.encode_seconds[70] == pytest.approx(result.encode_seconds[71] * (96 + 16) / 40)
    for image in range(3):
        assert (runner.encoder_cache.get_block_ids(image) is not None) == cached


def test_a_chunk_takes_its_rows_of_an_image_from_the_cache(qwen2_5_vl):
    runner = make_runner(qwen2_5_vl)
    sequences = image_sequences(runner, [[5, "0", 9]])
    expected = image_logits(qwen2_5_vl, sequences, 0, [0])
    image = encode(runner, 0, 1, cached=True)
    cuts = [0, 7, 20, 28, 29, 38]
    for start, stop in pairwise(cuts):
        first, last = max(start, 5), min(stop, 29)
        rows = (rows_of(image, first - 5, last - 5, first - start),) if first < last else ()
        result = runner.execute(sequences.plan([(0, start, stop)], encodes=(image,) if start == 0 else (),
                                               image_rows=rows))
        check(result, 0, expected[stop - 1])
        assert (result.encode_seconds == {}) == (start > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_image_in_a_model_of_one_layer_is_exact(tmp_path, device):
    """All three axes of M-RoPE move by one delta."""
    path = make_qwen2_5_vl(tmp_path, num_hidden_layers=1)
    runner = make_runner(path, device=device)
    sequences = image_sequences(runner, [[5, "0", 3], [31, "0", 8]])
    image = encode(runner, 0, 1, cached=True)
    runner.execute(sequences.plan([(0, 0, 32)], encodes=(image,), image_rows=(rows_of(image, 0, 24, 5),)))
    copy = KVCopy(tuple(sequences.tables[0]), 5, tuple(sequences.tables[1]), 31, 24, 26, (3,))
    result = runner.execute(sequences.plan([(1, 0, 34), (1, 55, 63)], copies=(copy,),
                                           image_rows=(rows_of(image, 0, 3, 31),)))
    check(result, 1, image_logits(path, sequences, 1, [0])[-1])


def test_a_failed_encode_leaves_a_miss(qwen2_5_vl):
    runner = make_runner(qwen2_5_vl)
    sequences = image_sequences(runner, [[5, "0", 3]])
    image = encode(runner, 0, 1, cached=True)
    broken = ImageEncode(image.key, image.grid, torch.randn(7, 1176), image.block_ids, 1)
    with pytest.raises((ValueError, RuntimeError, AssertionError, IndexError)):
        runner.execute(sequences.plan([(0, 0, 32)], encodes=(broken,)))
    assert runner.encoder_cache.get_block_ids(0) is None
    runner.encoder_cache.free(0)
    runner.encoder_cache.check_integrity()
