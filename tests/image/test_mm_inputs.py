"""mm_inputs: what fits is taken apart without a copy, what does not is refused with its numbers."""
import re

import numpy as np
import pytest
import torch

from nanovllm.image.inputs import expand_placeholders, parse_mm_inputs
from nanovllm.model_config import ModelConfig, RopeConfig, TextConfig, VisionConfig

IMAGE, VIDEO, START, END = 90, 91, 92, 93
VOCAB = 100
TEXT = TextConfig(
    hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=VOCAB,
    rms_norm_eps=1e-6, tie_word_embeddings=True, qkv_bias=True, o_bias=False, qk_norm=False,
    max_position_embeddings=4096, rope=RopeConfig("default", 5000.0, (2, 3, 3)))
VISION = VisionConfig(
    depth=1, hidden_size=48, num_heads=3, intermediate_size=80, out_hidden_size=64, patch_size=14,
    spatial_merge_size=2, temporal_patch_size=2, in_channels=3, window_size=112, fullatt_block_indexes=(0,),
    tokens_per_second=2)
MODEL = ModelConfig(
    path="here", architecture="Qwen2_5_VLForConditionalGeneration", text=TEXT, vision=VISION, image_token_id=IMAGE,
    video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, eos_token_ids=frozenset({1}),
    dtype="float32")
TEXT_MODEL = ModelConfig(
    path="here", architecture="Qwen3ForCausalLM", text=TEXT, vision=None, image_token_id=None, video_token_id=None,
    vision_start_token_id=None, vision_end_token_id=None, eos_token_ids=frozenset({1}), dtype="float32")
SMALL, WIDE, LARGE = (1, 4, 4), (1, 4, 10), (1, 8, 8)         # 56x56, 56x140, 112x112: 4, 10 and 16 tokens
CLIP = (3, 4, 6)                                              # 18 tokens


def tokens(grid):
    return grid[0] * grid[1] * grid[2] // 4


def pixels(*grids, seed=0):
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, 1176, generator=torch.Generator().manual_seed(seed))


def images(*grids, **more):
    return {"pixel_values": pixels(*grids), "image_grid_thw": torch.tensor(grids), **more}


def videos(*grids, **more):
    return {"pixel_values_videos": pixels(*grids, seed=1), "video_grid_thw": torch.tensor(grids), **more}


def prompt(*grids, pad=IMAGE):
    """Two ids, then each image between its marks."""
    ids = [1, 2]
    for grid in grids:
        ids += [START] + [pad] * tokens(grid) + [END]
    return [*ids, 3]


def parse(ids, mm_inputs, model=MODEL):
    return parse_mm_inputs(ids, mm_inputs, model)


# ---- placeholders

@pytest.mark.parametrize("order", [(SMALL, WIDE, LARGE), (LARGE, SMALL, WIDE), (WIDE, LARGE, SMALL)])
def test_images_of_different_size_get_their_own_rows(order):
    mm_inputs = images(*order)
    items = parse(prompt(*order), mm_inputs)
    start, row = 3, 0
    for item, grid in zip(items, order, strict=True):
        size = grid[1] * grid[2]
        assert (item.start, item.stop, item.grid, item.is_video) == (start, start + tokens(grid), grid, False)
        assert torch.equal(item.pixels, mm_inputs["pixel_values"][row:row + size])
        assert item.key is None and item.kv_key is None and item.time_interval == 0.0
        start, row = item.stop + 2, row + size


def test_pixels_are_views():
    mm_inputs = images(SMALL, WIDE)
    items = parse(prompt(SMALL, WIDE), mm_inputs)
    mm_inputs["pixel_values"][16, 0] = 7.0
    assert items[1].pixels[0, 0] == 7.0
    array = {"pixel_values": pixels(SMALL).numpy(), "image_grid_thw": [SMALL]}
    assert np.shares_memory(parse(prompt(SMALL), array)[0].pixels, array["pixel_values"])


def test_bytes_of_another_order_are_turned():
    mm_inputs = images(SMALL)
    swapped = mm_inputs["pixel_values"].numpy().astype(">f4")
    item, = parse(prompt(SMALL), mm_inputs | {"pixel_values": swapped})
    assert torch.equal(torch.from_numpy(item.pixels), mm_inputs["pixel_values"])


def test_images_and_videos_in_the_order_they_stand():
    ids = prompt(CLIP, pad=VIDEO) + prompt(SMALL) + prompt(CLIP, pad=VIDEO) + prompt(WIDE)
    items = parse(ids, {**images(SMALL, WIDE), **videos(CLIP, CLIP, second_per_grid_ts=[0.5, 2])})
    assert [item.is_video for item in items] == [True, False, True, False]
    assert [item.grid for item in items] == [CLIP, SMALL, CLIP, WIDE]
    assert [item.time_interval for item in items] == [1.0, 0.0, 4.0, 0.0]
    for item in items:
        assert set(ids[item.start:item.stop]) == {VIDEO if item.is_video else IMAGE}


@pytest.mark.parametrize("seconds", [None, [1.0], [1], np.array([1.0]), torch.tensor([1.0]), [torch.tensor(1.0)],
                                     torch.tensor([1.0], dtype=torch.bfloat16)])
def test_seconds_per_grid_default_to_one(seconds):
    item, = parse(prompt(CLIP, pad=VIDEO), videos(CLIP, second_per_grid_ts=seconds))
    assert item.time_interval == 2.0


@pytest.mark.parametrize("convert", [
    torch.Tensor.numpy, torch.Tensor.tolist, lambda x: x, lambda x: x.numpy().T.copy().T, list,
    lambda x: x.int() if x.dtype == torch.int64 else x.double()])
def test_tensors_arrays_and_lists_are_the_same(convert):
    mm_inputs = {key: convert(value) for key, value in images(SMALL, WIDE).items()}
    items = parse(prompt(SMALL, WIDE), mm_inputs)
    for item, expected in zip(items, parse(prompt(SMALL, WIDE), images(SMALL, WIDE)), strict=True):
        assert (item.start, item.grid) == (expected.start, expected.grid)
        assert np.allclose(np.asarray(item.pixels), expected.pixels.numpy())
        assert all(type(size) is int for size in item.grid)


def test_what_the_processor_says_of_the_text_is_ignored():
    transformers = pytest.importorskip("transformers")
    ids = prompt(SMALL)
    batch = transformers.BatchFeature({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)),
                                       "mm_token_type_ids": torch.zeros(1, len(ids)), **images(SMALL)})
    assert len(parse(ids, batch)) == 1


@pytest.mark.parametrize("mm_inputs", [None, {}, {"pixel_values": None, "image_grid_thw": None}, {"input_ids": [[1]]},
                                       {"pixel_values": np.empty((0, 1176)), "image_grid_thw": np.empty((0, 3), int)}])
def test_text_alone_has_no_items(mm_inputs):
    assert parse([1, 2, 3], mm_inputs) == []


def test_images_that_touch_are_split_by_their_grids():
    ids = [1] + [IMAGE] * 14 + [VIDEO] * 18 + [IMAGE] * 4
    items = parse(ids, {**images(SMALL, WIDE, SMALL), **videos(CLIP)})
    assert [(item.start, item.stop) for item in items] == [(1, 5), (5, 15), (15, 33), (33, 37)]


COUNTS = [
    ("one too few", [1] + [IMAGE] * 3, (SMALL,),
     r"3 image placeholders \(token 90\) in runs of \[3\].* 1 images of \[4\]"),
    ("one too many", [1] + [IMAGE] * 5, (SMALL,), r"5 image placeholders .* \[5\].*\[4\]"),
    ("2 images, 1 place", prompt(SMALL), (SMALL, SMALL), r"4 image .* \[4\].* 2 images of \[4, 4\]"),
    ("1 image, 2 places", prompt(SMALL, SMALL), (SMALL,), r"8 image .* \[4, 4\].* 1 images of \[4\]"),
    ("no image, 1 place", prompt(SMALL), (), r"4 image .* 0 images of \[\]"),
    ("no place", [1, 2, 3], (SMALL,), r"0 image .* \[\].* 1 images of \[4\]"),
    ("typed before", [1, IMAGE, 2, *prompt(SMALL)], (SMALL,), r"5 image .* \[1, 4\]"),
    ("typed, touching", [1] + [IMAGE] * 6 + [2] + [IMAGE] * 10, (SMALL, WIDE), r"16 image .* \[6, 10\]"),
    ("one short, the next long", [1] + [IMAGE] * 3 + [2] + [IMAGE] * 11, (SMALL, WIDE), r"\[3, 11\].* \[4, 10\]"),
    ("one long, the next short", [1] + [IMAGE] * 5 + [2] + [IMAGE] * 9, (SMALL, WIDE), r"\[5, 9\].* \[4, 10\]"),
    ("in other order", prompt(WIDE, SMALL), (SMALL, WIDE), r"\[10, 4\].* \[4, 10\]"),
    ("torn", [IMAGE] * 2 + [1] + [IMAGE] * 2, (SMALL,), r"\[2, 2\]"),
    ("one mark each, not expanded", [1, IMAGE, 2], (SMALL,), r"1 image .* \[1\].* \[4\]"),
    ("many typed", [IMAGE, 1] * 1000, (), r"1000 image .*, \.\.\.\]"),
]


@pytest.mark.parametrize("ids, grids, names", [case[1:] for case in COUNTS], ids=[case[0] for case in COUNTS])
def test_placeholders_must_fit_the_grids(ids, grids, names):
    with pytest.raises(ValueError, match=names):
        parse(ids, images(*grids) if grids else None)


def test_video_placeholders_are_counted_on_their_own():
    with pytest.raises(ValueError, match=r"18 video placeholders \(token 91\).* 0 videos"):
        parse(prompt(CLIP, pad=VIDEO), None)
    with pytest.raises(ValueError, match=r"0 video placeholders .* 1 videos of \[18\]"):
        parse(prompt(CLIP), {**videos(CLIP), **images((1, 12, 6))})


# ---- wrong inputs

@pytest.mark.parametrize("mm_inputs, names", [
    ({"pixel_values": pixels(SMALL)[:-4], "image_grid_thw": [SMALL]}, r"12 rows .* 16 patches \(\[16\]\)"),
    ({"pixel_values": pixels(SMALL, SMALL), "image_grid_thw": [SMALL]}, "32 rows .* 16 patches"),
    ({"pixel_values": pixels(SMALL)}, "pixel_values but no image_grid_thw"),
    ({"image_grid_thw": [SMALL]}, "image_grid_thw with 1 rows but no pixel_values"),
    ({"pixel_values": pixels(SMALL)[:, :588], "image_grid_thw": [SMALL]}, r"\(16, 588\).*\[patches, 1176\]"),
    ({"pixel_values": pixels(SMALL)[None], "image_grid_thw": [SMALL]}, r"\(1, 16, 1176\)"),
    ({"pixel_values": "a.png", "image_grid_thw": [SMALL]}, "a.png"),
    ({"pixel_values": [[1.0], [2.0, 3.0]], "image_grid_thw": [SMALL]}, "rows of numbers"),
    ({"pixel_values": np.empty((16, 1176), object), "image_grid_thw": [SMALL]}, "object"),
    ({"pixel_values": np.empty((16, 1176), np.longdouble), "image_grid_thw": [SMALL]}, "at most 64 bits"),
    ({"pixel_values": pixels(SMALL).to_sparse(), "image_grid_thw": [SMALL]}, "dense tensor of real numbers"),
    ({"pixel_values": pixels(SMALL).to("meta"), "image_grid_thw": [SMALL]}, "on device meta"),
    ({"pixel_values": pixels(SMALL) + 0j, "image_grid_thw": [SMALL]}, "complex64"),
    (images((1, 0, 4)), r"\(1, 0, 4\).*positive multiples of 2"), (images((1, 4, 5)), r"\(1, 4, 5\).*multiples of 2"),
    (images((0, 4, 4)), r"\(0, 4, 4\)"), (images((2, 4, 4)), "an image has t = 1; pass a video as pixel_values_videos"),
    ({"pixel_values": pixels(SMALL), "image_grid_thw": [(1, -4, -4)]}, r"\(1, -4, -4\)"),
    ({"pixel_values": pixels(SMALL), "image_grid_thw": [1, 4, 4]}, r"rows of three ints \(t, h, w\), not \[1, 4, 4\]"),
    ({"pixel_values": pixels(SMALL), "image_grid_thw": [(4, 4)]}, r"row 0 .*\(4, 4\)"),
    ({"pixel_values": pixels(SMALL), "image_grid_thw": np.array([[1.0, 4.0, 4.0]])}, "rows of three ints"),
    ({"pixel_values": pixels(SMALL), "image_grid_thw": 3}, "rows of three ints"),
    ({"image_grid_thw": [(1, 2**40, 2**40)], "image_hashes": [1]}, "4 image placeholders"),
    (images(SMALL, pixel_value=1), r"unknown mm_inputs \['pixel_value'\]"),
    (images(SMALL, video_hashes=None), "video_hashes"),
    ([images(SMALL)], "dict or None, not list"), ("image", "not str"),
    (images(SMALL, image_hashes=[1, 2]), "2 image_hashes but 1 rows of image_grid_thw"),
    (images(SMALL, image_hashes=7), "one int for each image, not 7"),
    (images(SMALL, image_hashes=[]), "0 image_hashes but 1 rows"),
    ({"image_hashes": [1]}, "1 image_hashes but 0 rows of image_grid_thw.* grid is always needed"),
    (images(SMALL, image_hashes=[1.5]), "image hash 1.5 at index 0"), (images(SMALL, image_hashes=["a"]), "'a'"),
    (images(SMALL, image_hashes=[True]), "True"),
    (images(SMALL, second_per_grid_ts=[1.0]), "1 second_per_grid_ts but 0 videos"),
])
def test_wrong_image_inputs_are_refused(mm_inputs, names):
    with pytest.raises(ValueError, match=names):
        parse(prompt(SMALL), mm_inputs)


@pytest.mark.parametrize("seconds, names", [
    ([], "0 second_per_grid_ts but 1 videos"), ([1, 2], "2 second_per_grid_ts"), ([0], "holds 0.0"), ([-0.5], "-0.5"),
    ([float("nan")], "nan"), ([float("inf")], "inf"), ([1e300], "1e[+]300"),
    (["x"], "must be numbers"), (1.0, "must be numbers")])
def test_wrong_seconds_are_refused(seconds, names):
    with pytest.raises(ValueError, match=names):
        parse(prompt(CLIP, pad=VIDEO), videos(CLIP, second_per_grid_ts=seconds))


@pytest.mark.parametrize("key", [
    "pixel_values", "image_grid_thw", "image_hashes", "pixel_values_videos", "video_grid_thw"])
@pytest.mark.parametrize("check", [parse_mm_inputs, expand_placeholders])
def test_a_text_model_refuses_images_by_name(key, check):
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM reads text only: remove {key}"):
        check([1, IMAGE], {key: [1]}, TEXT_MODEL)


def test_a_text_model_knows_no_placeholders():
    assert parse([1, IMAGE, VIDEO], {"pixel_values": None, "input_ids": [[1]]}, TEXT_MODEL) == []
    assert expand_placeholders([1, IMAGE], None, TEXT_MODEL) == [1, IMAGE]


# ---- strings

def test_one_mark_becomes_the_tokens_of_its_image():
    ids = [1, START, IMAGE, END, VIDEO, 2, IMAGE, IMAGE, 3]
    mm_inputs = {**images(SMALL, WIDE, LARGE), **videos(CLIP)}
    expanded = expand_placeholders(ids, mm_inputs, MODEL)
    assert expanded == [1, START, *[IMAGE] * 4, END, *[VIDEO] * 18, 2, *[IMAGE] * 26, 3]
    assert set(map(type, expanded)) == {int}
    assert len(parse(expanded, mm_inputs)) == 4
    assert expand_placeholders([1, 2], None, MODEL) == [1, 2]


@pytest.mark.parametrize("ids, mm_inputs, names", [
    ([1, IMAGE], images(SMALL, SMALL), "1 image placeholders .* 2 images"),
    ([1, IMAGE, 2, IMAGE], images(SMALL), "2 image placeholders .* 1 images"),            # one typed by the user
    ([1, IMAGE], None, "1 image placeholders .* 0 images"), ([1, 2], images(SMALL), "0 image placeholders .* 1 images"),
    (prompt(SMALL), images(SMALL), "4 image placeholders .* 1 images.* as token ids"),     # expanded already
    ([1, IMAGE], videos(CLIP), "1 image placeholders .* 0 images"),
    ([1, VIDEO, VIDEO], videos(CLIP), "2 video placeholders .* 1 videos"),
    ([1, IMAGE], {"image_grid_thw": [(1, 2**40, 2**40)], "image_hashes": [1]}, f"{2**78 + 1} tokens .* takes 4096"),
    ([1, IMAGE], images((1, 4, 3)), "multiples of 2"), ([1, IMAGE], {"grid": 1}, "grid")])
def test_marks_must_fit_the_images(ids, mm_inputs, names):
    with pytest.raises(ValueError, match=names):
        expand_placeholders(ids, mm_inputs, MODEL)


def test_messages_stay_short():
    with pytest.raises(ValueError) as error:
        parse(prompt(SMALL), {"pixel_values": pixels(SMALL), "image_grid_thw": [[[1] * 10**4]]})
    assert len(re.sub(r"\s", "", str(error.value))) < 300
