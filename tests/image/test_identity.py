"""What makes two pictures the same one: content and grid, or the caller's name, within one salt."""
import numpy as np
import pytest
import torch

from nanovllm.image.hashing import content_hash, fingerprint
from nanovllm.image.inputs import identify
from tests.image.test_mm_inputs import CLIP, LARGE, SMALL, VIDEO, WIDE, images, parse, pixels, prompt, videos


def identified(ids, mm_inputs, salt=None):
    items = parse(ids, mm_inputs)
    for item in items:
        identify(item, salt)
    return items


def test_content_keys():
    mm_inputs = images(SMALL, SMALL)
    mm_inputs["pixel_values"][16:] = mm_inputs["pixel_values"][:16]
    first, second = identified(prompt(SMALL, SMALL), mm_inputs)
    assert first.key == second.key == ("content", None, content_hash(mm_inputs["pixel_values"][:16], SMALL), SMALL)
    assert first.kv_key == first.key and first.fingerprint is None
    salted, _ = identified(prompt(SMALL, SMALL), mm_inputs, "tenant")
    assert salted.key == ("content", "tenant", *first.key[2:])
    flat = {"pixel_values": mm_inputs["pixel_values"][:16], "image_grid_thw": [(1, 2, 8)]}
    other, = identified(prompt((1, 2, 8)), flat)
    assert other.key != first.key              # the same rows under another grid


def test_callers_names_have_a_namespace_of_their_own():
    digest = content_hash(pixels(SMALL), SMALL)
    item, = identified(prompt(SMALL), images(SMALL, image_hashes=[digest]), "tenant")
    assert item.key == item.kv_key == ("caller", "tenant", digest, SMALL)
    assert item.fingerprint == fingerprint(pixels(SMALL), SMALL)
    for hashes in (np.array([7]), torch.tensor([7]), (7,), [np.uint64(7)]):
        assert identified(prompt(SMALL), images(SMALL, image_hashes=hashes))[0].key == ("caller", None, 7, SMALL)
    large, = identified(prompt(LARGE), images(LARGE, image_hashes=[digest]), "tenant")
    assert large.key != item.key               # one forged name, two sizes


def test_named_images_may_come_without_pixels():
    first, second = identified(prompt(SMALL, WIDE), {"image_grid_thw": [SMALL, WIDE], "image_hashes": [-3, 2**200]})
    assert first.pixels is second.pixels is first.fingerprint is None
    assert (first.key, second.key) == (("caller", None, -3, SMALL), ("caller", None, 2**200, WIDE))
    with pytest.raises(ValueError, match="video_grid_thw with 1 rows but no pixel_values_videos"):
        parse(prompt(SMALL), {"image_grid_thw": [SMALL], "image_hashes": [1], "video_grid_thw": [CLIP]})


def test_a_videos_kv_is_told_apart_by_its_pace():
    ids = prompt(CLIP, pad=VIDEO)
    slow, = identified(ids, videos(CLIP, second_per_grid_ts=[1.0]))
    fast, = identified(ids, videos(CLIP, second_per_grid_ts=[0.5]))
    assert slow.key == fast.key and slow.kv_key == (slow.key, 2.0) and fast.kv_key == (fast.key, 1.0)


def test_a_picture_changed_in_place_is_another_picture():
    mm_inputs = images(SMALL)
    before, = identified(prompt(SMALL), mm_inputs)
    key = before.key
    mm_inputs["pixel_values"][3, 5] += 1
    assert identified(prompt(SMALL), mm_inputs)[0].key != key
