"""What a caller passes as token ids and `mm_inputs`, checked to the last placeholder."""
from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.image.hashing import content_hash, fingerprint
from nanovllm.image.items import Grid, ImageItem, count_tokens
from nanovllm.model_config import ModelConfig, VisionConfig

MM_KEYS = ("pixel_values", "image_grid_thw", "image_hashes",
           "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
# A processor's whole BatchFeature is welcome: what it says about the text is passed beside it as the prompt.
TEXT_KEYS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
MAX_SECONDS_PER_GRID = 1e6      # keeps positions far inside int64


def check_token_ids(ids: Any, vocab_size: int) -> NDArray[np.int64]:
    """`ids` (list or tuple of ints or numpy ints, 1-D array or tensor) as an array of its own, in [0, vocab_size).

    Raises ValueError for an empty prompt, more than one dimension, floats, bools and ids outside the vocabulary.
    """
    if hasattr(ids, "tolist"):
        if len(ids.shape) != 1:
            raise ValueError(f"token ids of one prompt must be one-dimensional, not of shape {tuple(ids.shape)}")
        # an empty numpy array or tensor is of floats unless told otherwise; it is refused below as what it is
        if "int" not in str(ids.dtype) and len(ids):
            raise ValueError(f"token ids must be ints, not {ids.dtype}: {ids.tolist()[0]!r} at index 0")
        ids = ids.tolist()
    elif not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
        raise ValueError(f"token ids must be a list of ints, not {type(ids).__name__}: {ids!r:.80}")
    if not len(ids):
        raise ValueError("an empty prompt has no token to start from: pass at least one token id")
    suspects: Sequence[int]
    try:        # one pass in C, which takes whatever has `__index__`; a bool does, and looks like 0 or 1
        values = np.frombuffer(array("q", ids), np.int64)
        suspects = np.flatnonzero((values < 2) | (values >= vocab_size)).tolist()
    except (TypeError, OverflowError):
        values, suspects = np.empty(0, np.int64), range(len(ids))
    for i in suspects:
        value = ids[i] if type(ids[i]) is int else _as_int(ids[i], "token id", i)
        if not 0 <= value < vocab_size:
            raise ValueError(f"token id {value} at index {i} is outside the vocabulary: 0 <= id < {vocab_size}")
    assert len(values) == len(ids)
    return values


def expand_placeholders(
    token_ids: Sequence[int], mm_inputs: Mapping[str, Any] | None, model_config: ModelConfig
) -> list[int]:
    """Ids of a tokenised string with the one placeholder of each image or video repeated to its number of tokens.

    A string holds exactly one mark for each image and video, in the order of the grids; one that a processor has
    expanded already is refused (pass its ids instead). Raises ValueError naming both counts, for grids as
    `parse_mm_inputs`, and for a prompt that would be longer than the model's max_position_embeddings.
    """
    given, vision = _given_inputs(mm_inputs, model_config), model_config.vision
    if vision is None:
        return list(token_ids)
    ids = np.asarray(token_ids, dtype=np.int64)
    repeats = np.ones_like(ids)
    for is_video in (False, True):
        name, pad_id = _name_and_pad(is_video, model_config)
        counts = [count_tokens(grid, vision.spatial_merge_size) for grid in _grids(given, is_video, vision)]
        marks = np.flatnonzero(ids == pad_id)
        if len(marks) != len(counts):
            raise ValueError(
                f"the prompt holds {len(marks)} {name} placeholders (token {pad_id}) but mm_inputs holds {len(counts)} "
                f"{name}s: write one placeholder for each in a string; pass already expanded prompts as token ids")
        total, limit = len(ids) - len(marks) + sum(counts), model_config.text.max_position_embeddings
        if counts and total > limit:
            raise ValueError(f"the prompt has {total} tokens with its {len(counts)} {name}s, the model takes {limit}: "
                             f"use fewer or smaller ones")
        repeats[marks] = counts
    expanded: list[int] = np.repeat(ids, repeats).tolist()
    return expanded


def parse_mm_inputs(
    token_ids: Sequence[int] | NDArray[np.int64], mm_inputs: Mapping[str, Any] | None, model_config: ModelConfig
) -> list[ImageItem]:
    """Images and videos of one prompt in the order they stand in `token_ids`, without keys: see `identify`.

    `mm_inputs` holds what the Hugging Face processor returns, as torch tensors, numpy arrays or lists:
    pixel_values [patches of all images, patch_dim] and image_grid_thw [images, 3]; pixel_values_videos,
    video_grid_thw and second_per_grid_ts [videos] (seconds from one temporal grid to the next; 1.0 if left out, as in
    transformers); image_hashes, one int for each image, beside or instead of pixel_values. None is as good as absent.
    The processor's text outputs are ignored. Pixels are not copied unless they lie on a device or with gaps.

    Image i takes the next placeholders of the prompt, exactly as many as its grid has tokens, in a row; two images
    may touch. Raises ValueError naming the counts if they do not fit, for unknown keys, a missing or wrong grid,
    missing pixels and wrong shapes, and for any image input to a text-only model.
    """
    given, vision = _given_inputs(mm_inputs, model_config), model_config.vision
    if vision is None:
        return []
    ids = np.asarray(token_ids, dtype=np.int64)
    items: list[ImageItem] = []
    for is_video in (False, True):
        grids = _grids(given, is_video, vision)
        hashes = [None] * len(grids) if is_video else _image_hashes(given, len(grids))
        pixels = _pixel_views(given, is_video, grids, vision, may_be_absent=None not in hashes)
        seconds = _seconds_per_grid(given, len(grids)) if is_video else [0.0] * len(grids)
        starts = _placeholder_starts(ids, is_video, grids, model_config)
        items += [
            ImageItem(key=None, kv_key=None, start=start, stop=start + count_tokens(grid, vision.spatial_merge_size),
                      grid=grid, is_video=is_video, pixels=view, time_interval=second * vision.tokens_per_second,
                      caller_hash=caller_hash)
            for start, grid, view, second, caller_hash in zip(starts, grids, pixels, seconds, hashes)]
    return sorted(items, key=lambda item: item.start)


def identify(item: ImageItem, cache_salt: str | None = None, threads: Executor | None = None) -> None:
    """Sets `key`, `kv_key` and `fingerprint`: hashes the pixels if the caller did not name the image."""
    if item.caller_hash is None:
        set_key(item, content_key(item, cache_salt, content_hash(item.pixels, item.grid, threads)))
    else:
        set_key(item, ("caller", cache_salt, item.caller_hash, item.grid))
        item.fingerprint = None if item.pixels is None else fingerprint(item.pixels, item.grid)


def content_key(item: ImageItem, cache_salt: str | None, digest: int) -> Hashable:
    """The key of an image whose pixels have that digest."""
    return "content", cache_salt, digest, item.grid


def set_key(item: ImageItem, key: Hashable) -> None:
    item.key = key
    item.kv_key = (key, item.time_interval) if item.is_video else key


def _given_inputs(mm_inputs: Mapping[str, Any] | None, model_config: ModelConfig) -> dict[str, Any]:
    """The image and video inputs that are there, by name."""
    if mm_inputs is None:
        return {}
    if not isinstance(mm_inputs, Mapping):
        raise ValueError(f"mm_inputs of one prompt must be a dict or None, not {type(mm_inputs).__name__}")
    unknown = [key for key in mm_inputs if key not in MM_KEYS + TEXT_KEYS]
    if unknown:
        raise ValueError(f"unknown mm_inputs {unknown}: known are {', '.join(MM_KEYS)}")
    given = {key: value for key, value in mm_inputs.items() if key in MM_KEYS and value is not None}
    if given and model_config.vision is None:
        raise ValueError(f"{model_config.architecture} reads text only: remove {', '.join(given)} from mm_inputs")
    return given


def _name_and_pad(is_video: bool, model_config: ModelConfig) -> tuple[str, int | None]:
    return ("video", model_config.video_token_id) if is_video else ("image", model_config.image_token_id)


def _grids(given: Mapping[str, Any], is_video: bool, vision: VisionConfig) -> list[Grid]:
    """Rows of image_grid_thw or video_grid_thw, in patches, each one that the tower can merge."""
    key = "video_grid_thw" if is_video else "image_grid_thw"
    merge = vision.spatial_merge_size
    try:
        grids = [tuple(operator.index(size) for size in _to_list(row)) for row in _to_list(given.get(key, ()))]
    except TypeError:
        raise ValueError(f"{key} must be rows of three ints (t, h, w), not {given[key]!r:.80}") from None
    for i, grid in enumerate(grids):
        if len(grid) != 3:
            raise ValueError(f"row {i} of {key} is {grid}: it must be (t, h, w)")
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise ValueError(f"row {i} of {key} is {grid}: t must be at least 1, h and w positive multiples of {merge}")
        if not is_video and grid[0] != 1:
            raise ValueError(f"row {i} of {key} is {grid}: an image has t = 1; pass a video as pixel_values_videos")
    return [(t, h, w) for t, h, w in grids]


def _pixel_views(
    given: Mapping[str, Any], is_video: bool, grids: Sequence[Grid], vision: VisionConfig, may_be_absent: bool
) -> list[Any]:
    """One view [t * h * w, patch_dim] of the caller's pixels for each grid; Nones if named images come without."""
    key, grid_key = ("pixel_values_videos", "video_grid_thw") if is_video else ("pixel_values", "image_grid_thw")
    if key not in given:
        if grids and not may_be_absent:
            raise ValueError(f"mm_inputs has {grid_key} with {len(grids)} rows but no {key}")
        return [None] * len(grids)
    if grid_key not in given:
        raise ValueError(f"mm_inputs has {key} but no {grid_key}: pass both, as the processor returns them")
    pixels = _pixel_rows(given[key], key)
    sizes = [math.prod(grid) for grid in grids]
    if len(pixels.shape) != 2 or pixels.shape[1] != vision.patch_dim:
        raise ValueError(f"{key} has shape {tuple(pixels.shape)}: this model takes [patches, {vision.patch_dim}]")
    if pixels.shape[0] != sum(sizes):
        raise ValueError(
            f"{key} has {pixels.shape[0]} rows but {grid_key} asks for {sum(sizes)} patches ({_brief(sizes)})")
    stops = np.cumsum(sizes, dtype=np.int64).tolist()
    return [pixels[stop - size:stop] for stop, size in zip(stops, sizes)]


def _pixel_rows(value: Any, key: str) -> Any:
    """A contiguous tensor or array in host memory, of numbers that torch knows; shares the caller's if it can."""
    if hasattr(value, "detach"):
        if str(value.layout) != "torch.strided" or value.is_meta or value.is_quantized or value.is_complex():
            raise ValueError(f"{key} must be a dense tensor of real numbers, not {value.dtype} of layout "
                             f"{value.layout} on device {value.device}")
        return value.detach().cpu().contiguous()
    try:
        array = np.ascontiguousarray(value, dtype=None if isinstance(value, np.ndarray) else np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a tensor, an array or rows of numbers, not {value!r:.80}") from None
    if array.dtype.kind not in "fiu" or array.dtype.itemsize > 8:
        raise ValueError(f"{key} must hold numbers of at most 64 bits, not {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _image_hashes(given: Mapping[str, Any], num_images: int) -> list[int | None]:
    if "image_hashes" not in given:
        return [None] * num_images
    values = _to_list(given["image_hashes"])
    if not isinstance(values, Sequence):
        raise ValueError(f"image_hashes must be a list with one int for each image, not {values!r:.80}")
    hashes: list[int | None] = [_as_int(value, "image hash", i) for i, value in enumerate(values)]
    if len(hashes) != num_images:
        raise ValueError(f"mm_inputs has {len(hashes)} image_hashes but {num_images} rows of image_grid_thw: "
                         f"one hash for each image, and the grid is always needed")
    return hashes


def _seconds_per_grid(given: Mapping[str, Any], num_videos: int) -> list[float]:
    if "second_per_grid_ts" not in given:
        return [1.0] * num_videos
    try:
        seconds = [float(value) for value in _to_list(given["second_per_grid_ts"])]
    except (TypeError, ValueError):
        raise ValueError(f"second_per_grid_ts must be numbers, not {given['second_per_grid_ts']!r:.80}") from None
    if len(seconds) != num_videos:
        raise ValueError(f"mm_inputs has {len(seconds)} second_per_grid_ts but {num_videos} videos: one for each video")
    for value in seconds:
        if not 0 < value <= MAX_SECONDS_PER_GRID:
            raise ValueError(
                f"second_per_grid_ts holds {value}: it must be above 0 and at most {MAX_SECONDS_PER_GRID:g}")
    return seconds


def _placeholder_starts(
    ids: np.ndarray[Any, Any], is_video: bool, grids: Sequence[Grid], model_config: ModelConfig
) -> list[int]:
    """Where each grid's placeholders begin; every placeholder of the prompt belongs to exactly one grid."""
    assert model_config.vision is not None
    name, pad_id = _name_and_pad(is_video, model_config)
    counts = [count_tokens(grid, model_config.vision.spatial_merge_size) for grid in grids]
    pads = np.flatnonzero(ids == pad_id)
    if len(pads) == sum(counts):
        lengths = np.array(counts, dtype=np.int64)
        firsts = np.cumsum(lengths) - lengths       # index into pads of each grid's first placeholder
        if np.array_equal(pads[firsts + lengths - 1] - pads[firsts], lengths - 1):
            starts: list[int] = pads[firsts].tolist()
            return starts
    runs = np.split(pads, np.flatnonzero(np.diff(pads) > 1) + 1) if len(pads) else []
    raise ValueError(
        f"the prompt holds {len(pads)} {name} placeholders (token {pad_id}) in runs of "
        f"{_brief([len(r) for r in runs])}, but mm_inputs holds {len(grids)} {name}s of {_brief(counts)} tokens: "
        f"each needs as many placeholders as tokens, in a row and in the order of the grids")


def _as_int(value: Any, what: str, index: int) -> int:
    if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise ValueError(f"{what} {value} at index {index} must be an int, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} {value!r:.80} at index {index} must be an int, not {type(value).__name__}") from None


def _to_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _brief(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 16 else f"[{', '.join(map(str, numbers[:16]))}, ...]"
