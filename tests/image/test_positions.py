"""M-RoPE positions against tables worked by hand, a per-token oracle and, for stills, transformers."""
import numpy as np
import pytest
import torch

from nanovllm.image.items import ImageItem, count_tokens
from nanovllm.image.positions import mrope_positions

MERGE = 2


def item(start, grid, time_interval=0.0, is_video=False):
    stop = start + count_tokens(grid, MERGE)
    return ImageItem(None, None, start, stop, grid, is_video, None, time_interval)


def still(start, height, width):
    """An image of height x width pixels with patches of 14."""
    return item(start, (1, height // 14, width // 14))


def video(start, frames, height, width, time_interval):
    return item(start, (frames, height // 14, width // 14), time_interval, is_video=True)


def one_by_one(num_tokens, items):
    """The rule, token by token."""
    rows, position = [], 0
    starts = {x.start: x for x in items}
    while len(rows) < num_tokens:
        x = starts.get(len(rows))
        if x is None:
            rows.append((position,) * 3)
            position += 1
            continue
        base = position
        for t in range(x.grid[0]):
            for h in range(x.grid[1] // MERGE):
                for w in range(x.grid[2] // MERGE):
                    rows.append((base + int(t * x.time_interval), base + h, base + w))
        position = 1 + max(max(row) for row in rows)
    return np.array(rows, dtype=np.int64).T, position - num_tokens


def test_text_counts_up_on_all_axes():
    positions, delta = mrope_positions(5, [], MERGE)
    assert positions.dtype == np.int64 and positions.shape == (3, 5) and delta == 0
    assert (positions == np.arange(5)).all()


def test_two_images_by_hand():
    """15 ids, 448x448, two marks, 448x448, one id."""
    first, second = still(15, 448, 448), still(15 + 256 + 2, 448, 448)
    positions, delta = mrope_positions(15 + 256 + 2 + 256 + 1, [first, second], MERGE)
    t, h, w = positions[:, first.start:first.stop]
    assert (t == 15).all()
    assert h.tolist() == [row for row in range(15, 31) for _ in range(16)]
    assert w.tolist() == list(range(15, 31)) * 16
    assert positions[:, first.stop:second.start].tolist() == [[31, 32]] * 3
    t, h, w = positions[:, second.start:second.stop]
    assert (t == 33).all()
    assert (h.min(), h.max(), w.min(), w.max()) == (33, 48, 33, 48)
    assert positions[:, -1].tolist() == [49] * 3
    assert delta == 50 - 530


def test_the_longer_side_moves_the_text_on():
    positions, _ = mrope_positions(3 + 10 + 1, [still(3, 56, 140)], MERGE)
    assert positions[:, 3:13].tolist() == [[3] * 10, [3] * 5 + [4] * 5, [3, 4, 5, 6, 7] * 2]
    assert positions[:, 13].tolist() == [8] * 3


@pytest.mark.parametrize("seconds, times, behind", [(0.5, [0, 1, 2, 3], 4), (1.0, [0, 2, 4, 6], 7)])
def test_video_by_hand(seconds, times, behind):
    """4 temporal grids of 56x56 at 2 tokens a second, after 7 ids."""
    positions, delta = mrope_positions(7 + 16 + 2, [video(7, 4, 56, 56, seconds * 2)], MERGE)
    t, h, w = positions[:, 7:23] - 7
    assert t.tolist() == [time for time in times for _ in range(4)]
    assert h.tolist() == [0, 0, 1, 1] * 4 and w.tolist() == [0, 1] * 8
    assert positions[:, 23:].tolist() == [[7 + behind, 8 + behind]] * 3
    assert delta == 7 + behind - 23


def test_floor_comes_last():
    positions, _ = mrope_positions(6 * 4, [video(0, 6, 56, 56, 0.6)], MERGE)
    assert positions[0, ::4].tolist() == [0, 0, 1, 1, 2, 3]


def test_short_video_on_a_large_picture_goes_on_behind_the_picture():
    positions, _ = mrope_positions(2 * 16 + 1, [video(0, 2, 112, 112, 1.0)], MERGE)
    assert positions[:, -1].tolist() == [4] * 3


@pytest.mark.parametrize("seed", range(8))
def test_any_layout_equals_the_rule_token_by_token(seed):
    rng = np.random.default_rng(seed)
    items, length = [], 0
    for _ in range(rng.integers(0, 6)):
        length += int(rng.integers(0, 9))                    # 0: images may touch
        h, w = (int(n) * MERGE for n in rng.integers(1, 7, 2))
        if rng.random() < 0.5:
            items.append(item(length, (1, h, w)))
        else:
            items.append(item(length, (int(rng.integers(1, 6)), h, w), float(rng.choice([0.25, 0.5, 1, 3.7])), True))
        length = items[-1].stop
    length += int(rng.integers(0, 9))
    positions, delta = mrope_positions(length, items, MERGE)
    expected, expected_delta = one_by_one(length, items)
    assert (positions == expected).all() and delta == expected_delta


def test_stills_equal_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2_5_VLConfig(
        text_config={"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 96, "vocab_size": 512, "rope_parameters": {
                         "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "hidden_size": 48, "num_heads": 3, "intermediate_size": 80, "out_hidden_size": 64,
                       "fullatt_block_indexes": [0], "tokens_per_second": 2})
    with torch.device("meta"):
        model = transformers.Qwen2_5_VLModel(config)
    rng = np.random.default_rng(0)
    for num_images in (1, 2, 3):
        grids = [(1, *(int(n) * MERGE for n in rng.integers(1, 13, 2))) for _ in range(num_images)]
        items, length = [], 4
        for grid in grids:
            items.append(item(length, grid))
            length = items[-1].stop + int(rng.integers(1, 20))
        kinds = torch.zeros(1, length, dtype=torch.int32)
        for x in items:
            kinds[0, x.start:x.stop] = 1
        expected, expected_delta = model.get_rope_index(
            input_ids=torch.zeros(1, length, dtype=torch.int64), mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor(grids), attention_mask=torch.ones(1, length, dtype=torch.int64))
        positions, delta = mrope_positions(length, items, MERGE)
        assert (positions == expected[:, 0].numpy()).all() and delta == int(expected_delta)
