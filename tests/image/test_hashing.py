"""Equal pixels have one digest, whatever holds them; anything else has another."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from nanovllm.image import hashing
from nanovllm.image.hashing import content_hash, fingerprint

GRID = (1, 4, 6)
BOTH = pytest.mark.parametrize("digest", [content_hash, fingerprint])


def pixels(rows=24, width=1176, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


@BOTH
def test_one_picture_has_one_digest(digest):
    array = pixels()
    expected = digest(array, GRID)
    tensor = torch.from_numpy(array)
    assert digest(tensor, GRID) == digest(tensor.clone().requires_grad_(), GRID) == expected
    for grid in (list(GRID), np.array(GRID, np.int32), np.array(GRID, np.int64), torch.tensor(GRID)):
        assert digest(tensor, grid) == expected


@BOTH
def test_memory_layout_does_not_matter(digest):
    array = pixels()
    expected = digest(array, GRID)
    for gaps in (torch.from_numpy(array.T.copy()).T, torch.from_numpy(np.repeat(array, 2, axis=0))[::2]):
        assert not gaps.is_contiguous() and digest(gaps, GRID) == expected
    assert digest(np.asfortranarray(array), GRID) == digest(np.repeat(array, 2, axis=1)[:, ::2], GRID) == expected


@BOTH
def test_same_bytes_of_another_kind_differ(digest):
    """Shape, dtype and grid are part of a picture: 56x112 is not 112x56, float32 not its bytes, 30x150 not 150x30."""
    raw = np.random.default_rng(1).integers(0, 256, 56 * 112 * 3, dtype=np.uint8)
    kinds = [raw.reshape(56, 112, 3), raw.reshape(112, 56, 3), raw.reshape(56, 336), raw, raw.view(np.int8),
             raw.view(np.float32), raw.view(">f4"), raw.view(np.int32), torch.from_numpy(raw).view(torch.bfloat16),
             torch.from_numpy(raw).view(torch.float16)]
    digests = {digest(kind, GRID) for kind in kinds}
    digests |= {digest(raw, grid) for grid in ((1, 30, 150), (1, 150, 30), (30, 1, 150), (13, 0, 150), (1, 301, 50))}
    assert len(digests) == len(kinds) + 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.int64])
def test_every_dtype_of_torch_works(dtype):
    tensor = torch.from_numpy(pixels()).to(dtype)
    other = tensor.clone()
    other[-1, -1] = 1 - other[-1, -1].to(torch.int32)
    assert content_hash(tensor, GRID) == content_hash(tensor.clone(), GRID) != content_hash(other, GRID)


@pytest.mark.parametrize("size", [1, 1000, hashing.SLICE_BYTES - 1, hashing.SLICE_BYTES, hashing.SLICE_BYTES + 1,
                                  3 * hashing.SLICE_BYTES + 5])
def test_every_byte_counts(size):
    raw = np.zeros(size, np.uint8)
    seen = {content_hash(raw, GRID)}
    places = sorted({0, size // 2, size - 1, min(size - 1, hashing.SLICE_BYTES)})
    for place in places:
        raw[place] = 1
        seen.add(content_hash(raw, GRID))
        raw[place] = 0
    assert len(seen) == 1 + len(places)


def test_order_of_slices_counts():
    first, second = np.zeros(hashing.SLICE_BYTES, np.uint8), np.ones(hashing.SLICE_BYTES, np.uint8)
    assert content_hash(np.stack([first, second]), GRID) != content_hash(np.stack([second, first]), GRID)


def test_number_of_threads_does_not_matter(monkeypatch):
    raw = np.random.default_rng(2).integers(0, 256, 5 * hashing.SLICE_BYTES + 3, dtype=np.uint8)
    digests = set()
    for cpus in (None, 1, 2, 3, 64):
        monkeypatch.setattr(os, "cpu_count", lambda cpus=cpus: cpus)
        digests.add(content_hash(raw, GRID))
    monkeypatch.setattr(hashing, "MIN_PARALLEL_SLICES", 100)        # in the caller's own thread
    digests.add(content_hash(raw, GRID))
    assert len(digests) == 1


def test_digest_is_wide_and_the_same_in_every_process():
    code = ("import sys, numpy as np; from nanovllm.image.hashing import content_hash, fingerprint;"
            "x = np.arange(99999, dtype=np.float32);"
            "print(content_hash(x, (1, 2, 3)), fingerprint(x, (1, 2, 3)), 'torch' in sys.modules)")
    outputs = {subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("0", "1", "random")}
    assert len(outputs) == 1 and outputs.pop().endswith("False\n")
    digests = [content_hash(np.array([n]), GRID) for n in range(64)]
    assert max(digest.bit_length() for digest in digests) > 120
    assert len({digest & (1 << 64) - 1 for digest in digests}) == 64


@BOTH
def test_no_pixels_at_all(digest):
    shapes = ((0, 1176), (1176, 0), (0,))
    assert len({digest(np.empty(shape, np.float32), GRID) for shape in shapes}) == 3
    assert digest(np.empty((0, 1176), np.float32), GRID) == digest(torch.empty(0, 1176), GRID)


def test_fingerprint_sees_every_region_of_a_picture():
    array = pixels(4096)
    expected = fingerprint(array, GRID)
    for row in range(0, 4096, 512):
        changed = array.copy()
        changed[row:row + 8] += 1          # 0.2 % of the picture, wherever
        assert fingerprint(changed, GRID) != expected
    for column in range(0, 1176, 147):
        changed = array.copy()
        changed[:, column:column + 8] += 1
        assert fingerprint(changed, GRID) != expected
    small = pixels(1, 100)                 # fewer values than it samples: all count
    for index in range(100):
        changed = small.copy()
        changed[0, index] += 1
        assert fingerprint(changed, GRID) != fingerprint(small, GRID)


def test_processor_settings_are_part_of_a_picture():
    """One picture under another max_pixels, or another background behind its transparent part, is another image."""
    transformers = pytest.importorskip("transformers")
    from PIL import Image
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 255, (448, 448, 4), dtype=np.uint8), "RGBA")
    seen = {}
    for edge in (50176, 200704):
        for colour in ("white", "black"):
            flat = Image.new("RGB", picture.size, colour)
            flat.paste(picture, mask=picture.getchannel("A"))
            processor = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": edge})
            out = processor(flat, return_tensors="pt")
            seen[edge, colour] = content_hash(out["pixel_values"], out["image_grid_thw"][0])
            assert out["image_grid_thw"][0].prod() == edge // 196
    assert len(set(seen.values())) == 4
