"""What callers pass becomes requests one by one, or is refused with a sentence that names it."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.engine.intake import ImageNames, build_sequence, split_prompts
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from tests.image.test_mm_inputs import IMAGE, MODEL

GRID = (1, 4, 4)                                        # 56x56 pixels: 16 patches, 4 tokens
ONE, TWO = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)


def patches(seed: int, *grids: tuple[int, int, int]) -> torch.Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, 1176, generator=torch.Generator().manual_seed(seed))


def build(prompt: Any, mm_inputs: Any = None, params: SamplingParams = ONE) -> Sequence:
    return build_sequence(prompt, params, mm_inputs, MODEL, tokenize=lambda text: [ord(c) - 32 for c in text])


# ---------------------------------------------------------------- one call, several prompts

@pytest.mark.parametrize("prompts, expected", [
    ("text", ["text"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]),
    ((1, 2), [(1, 2)]),
    ([], []), (["a", [1]], ["a", [1]]), ([[]], [[]]), ([""], [""]), ("", [""]), ([np.int64(3)], [[np.int64(3)]])])
def test_one_string_or_one_flat_list_is_one_prompt(prompts: Any, expected: list[Any]) -> None:
    assert split_prompts(prompts, ONE, None) == [(prompt, ONE, None) for prompt in expected]


@pytest.mark.parametrize("array", [np.array([1, 2, 3]), torch.tensor([1, 2, 3])])
def test_an_array_of_one_dimension_is_one_prompt_and_its_rows_are_several(array: Any) -> None:
    (prompt, _, _), = split_prompts(array, ONE, None)
    assert prompt.tolist() == [1, 2, 3]
    rows = array[None].repeat(2, 1) if isinstance(array, torch.Tensor) else np.stack([array, array])
    assert [prompt.tolist() for prompt, _, _ in split_prompts(rows, ONE, None)] == [[1, 2, 3]] * 2


def test_params_are_one_for_all_or_one_for_each() -> None:
    assert [params for _, params, _ in split_prompts(["a", "b"], TWO, None)] == [TWO, TWO]
    assert [params for _, params, _ in split_prompts(["a", "b"], [ONE, TWO], None)] == [ONE, TWO]
    assert [params for _, params, _ in split_prompts(["a", "b"], None, None)] == [SamplingParams()] * 2
    with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
        split_prompts(["a", "b", "c"], [ONE, TWO], None)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {1, 2}, iter(["a"]), np.array(3), torch.tensor(3)])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any) -> None:
    with pytest.raises(ValueError, match=f"prompts must be .* not {type(prompts).__name__}"):
        split_prompts(prompts, ONE, None)


def test_images_are_one_dict_for_one_prompt_and_a_list_for_several() -> None:
    images = {"image_grid_thw": [GRID]}
    assert split_prompts("a", ONE, images) == [("a", ONE, images)] == split_prompts("a", ONE, [images])
    assert [mm for _, _, mm in split_prompts(["a", "b"], ONE, [None, images])] == [None, images]
    with pytest.raises(ValueError, match="one dict for 2 prompts"):
        split_prompts(["a", "b"], ONE, images)
    with pytest.raises(ValueError, match="not str: 'ab'"):
        split_prompts(["a", "b"], ONE, "ab")
    with pytest.raises(ValueError, match="2 prompts but 1 mm_inputs"):
        split_prompts(["a", "b"], ONE, [images])


# ---------------------------------------------------------------- one request

@pytest.mark.parametrize("ids", [
    [5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int32(6)], "%&"])
def test_every_form_of_the_same_ids(ids: Any) -> None:
    seq = build(ids)
    assert seq.token_ids == [5, 6] and all(type(token_id) is int for token_id in seq.token_ids)
    assert seq.images == [] and seq.positions is None and seq.position_delta == 0


@pytest.mark.parametrize("prompt, match", [
    ("", "empty prompt"), ([], "empty prompt"), ([100], "100 .*0 <= id < 100"), ([-1], "-1"), ([2**40], str(2**40)),
    ([1.5], "1.5"), ([True], "bool"), ([[1]], "list"), (np.array([1.0]), "float"), (None, "NoneType"),
    ("\ud800", "surrogates"), ([1, IMAGE], "1 image placeholders"), (torch.tensor([[1]]), "one-dimensional")])
def test_bad_prompts_are_refused(prompt: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(prompt)


def test_images_are_placed_before_they_are_identified() -> None:
    seq = build([5, *[IMAGE] * 4, 6], {"pixel_values": patches(0, GRID), "image_grid_thw": [GRID]})
    image, = seq.images
    assert (image.start, image.stop, image.key) == (1, 5, None) and seq.image_token_range == (1, 5)
    assert seq.positions is not None and seq.positions.tolist()[2] == [0, 1, 2, 1, 2, 3] and seq.position_delta == -2
    seconds = ImageNames().identify(seq)
    assert seconds > 0 and image.key[0] == "content" and seq.image_hashes == [image.key] == [image.kv_key]
    assert ImageNames().identify(build([5])) == 0.0


# ---------------------------------------------------------------- names that callers give

def named(names: ImageNames, name: int, seed: int | None, salt: str | None = None) -> Any:
    """The key of an image of that name; `seed` of its pixels, None: without."""
    inputs: dict[str, Any] = {"image_grid_thw": [GRID], "image_hashes": [name]}
    if seed is not None:
        inputs["pixel_values"] = patches(seed, GRID)
    seq = build([*[IMAGE] * 4, 6], inputs, SamplingParams(cache_salt=salt))
    names.identify(seq)
    assert seq.images[0].key == seq.images[0].kv_key == seq.image_hashes[0]
    return seq.images[0].key


def test_a_name_without_pixels_means_those_last_seen() -> None:
    names = ImageNames()
    first = named(names, 7, seed=0)
    assert named(names, 7, seed=None) == first == named(names, 7, seed=0)
    other = named(names, 7, seed=1)                      # the same name beside other pixels is another image
    assert other != first and named(names, 7, seed=None) == other
    assert named(names, 7, seed=0) == first == named(names, 7, seed=None)


def test_names_salts_and_contents_never_meet() -> None:
    names = ImageNames()
    keys = {named(names, 7, 0), named(names, 8, 0), named(names, 7, 0, salt="a"), named(names, 9, None)}
    content = build([*[IMAGE] * 4, 6], {"pixel_values": patches(0, GRID), "image_grid_thw": [GRID]})
    names.identify(content)
    assert len(keys | {content.images[0].key}) == 5


def test_the_oldest_name_is_forgotten_first() -> None:
    names = ImageNames(capacity=2)
    keys = [named(names, name, seed=name) for name in (1, 2)]
    named(names, 1, seed=1)                              # seen again
    named(names, 3, seed=3)
    assert named(names, 1, None) == keys[0] and named(names, 2, None) != keys[1] and len(names.fingerprints) == 2


def test_the_config_is_all_that_is_read_of_a_model() -> None:
    """A text model's sequence has no images and plain positions."""
    text_model = SimpleNamespace(text=SimpleNamespace(vocab_size=10), vision=None, architecture="Qwen3ForCausalLM")
    seq = build_sequence([1, 2], TWO, None, text_model, tokenize=list)      # type: ignore[arg-type]
    assert seq.token_ids == [1, 2] and seq.sampling_params is TWO
    with pytest.raises(ValueError, match="Qwen3ForCausalLM reads text only"):
        build_sequence([1, 2], TWO, {"image_grid_thw": [GRID]}, text_model, tokenize=list)      # type: ignore[arg-type]
