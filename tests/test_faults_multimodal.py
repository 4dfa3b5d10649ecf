"""Faults that engines of this kind had with positions, chunks and room for images, each tried end to end."""
from __future__ import annotations

from itertools import permutations

import pytest

from tests.engines import (
    check_all,
    encoded_grids,
    encoder_ratio,
    generate,
    greedy,
    make_llm,
)
from tests.prompts import END, IMAGE, START, Picture, picture, prompt, text, video

ASKED = greedy(6, logprobs=-1)


# ---------------------------------------------------------------- chunks, positions, merging of embeddings

@pytest.mark.parametrize("budget", [16, 100, 128, 135, 256, 4096])
@pytest.mark.parametrize("caching", [False, True])
def test_chunk_borders_inside_images_and_text(folder, oracle, budget, caching):
    """135: the three chunks of the first prompt end with one of exactly one token."""
    image = picture(448, 448)
    prompts = [prompt(text(10), image, text(3)), prompt(text(300, seed=1)), prompt(image, text(20, seed=2))]
    assert len(prompts[0]) == 2 * 135 + 1
    with make_llm(folder, max_num_batched_tokens=budget, enable_prefix_caching=caching) as llm:
        for words in prompts:
            check_all(llm, oracle, words)
        check_all(llm, oracle, *prompts)


def test_prefix_hit_that_ends_inside_an_image(llm, oracle):
    """Same text and image, another question; then the same start and another picture behind the first 12 blocks."""
    image, ids = picture(448, 448), text(10)
    check_all(llm, oracle, prompt(ids, image, text(9, seed=1)))
    again, = check_all(llm, oracle, prompt(ids, image, text(9, seed=2)))
    assert again["num_cached_tokens"] == 256 and again["vit_time"] == 0         # of 11 + 256: the hit ends in the image
    check_all(llm, oracle, prompt(ids, picture(448, 448, seed=1), text(9, seed=1)))


@pytest.mark.parametrize("marks", [False, True])
def test_image_wholly_in_cached_blocks_is_not_encoded_again(llm, oracle, marks):
    words = prompt(picture(224, 224), text(100), marks=marks)
    with encoded_grids(llm) as grids:
        first, second = check_all(llm, oracle, words)[0], check_all(llm, oracle, words)[0]
    assert grids == [(1, 16, 16)] and second["num_cached_tokens"] > 64 > first["num_cached_tokens"]


def test_images_of_different_sizes_in_every_order(llm, oracle):
    pictures = [picture(56, 56), picture(56, 140), picture(112, 112)]
    prompts = [prompt(text(4), *order, text(4)) for order in permutations(pictures)]
    with encoded_grids(llm) as grids:
        check_all(llm, oracle, *prompts)
    assert sorted(grids) == sorted(p.grid for p in pictures)        # six requests in one batch: once each


def test_interval_of_a_video_reaches_the_positions(llm, oracle):
    pixels = video(4, 56, 56, 0.5).pixels
    clips = [Picture((4, 4, 4), pixels, seconds) for seconds in (0.5, 1.0, 0.25)]
    outputs = check_all(llm, oracle, *(prompt(text(5), clip, text(5)) for clip in clips))
    rows = [output["logprobs"][0][0] for output in outputs]
    assert len({round(row, 4) for row in rows}) == 3
    with encoded_grids(llm) as grids:       # time is no matter of the tower
        check_all(llm, oracle, prompt(text(6), Picture((4, 4, 4), pixels, 2.0), text(5)))
    assert grids == []


@pytest.mark.parametrize("last", ["image", "video", "two images"])
def test_prompt_that_ends_with_a_placeholder(llm, oracle, last):
    parts = {"image": [picture(56, 140)], "video": [video(3, 56, 56, 0.5)], "two images": [picture(56, 56)] * 2}
    words = prompt(text(7), *parts[last], marks=False)
    assert words.token_ids[-1] not in (END, START)
    for _ in range(2):
        check_all(llm, oracle, words)


def test_prompt_of_image_placeholders_alone(llm, oracle):
    for image, marks in ((picture(56, 56), False), (picture(112, 112), False), (picture(56, 56), True)):
        for _ in range(2):
            check_all(llm, oracle, prompt(image, marks=marks))


def test_placeholders_that_do_not_fit_the_images_are_refused_with_the_counts(llm):
    small = picture(56, 56)
    mm_inputs = prompt(small).mm_inputs
    for count in (3, 5):
        with pytest.raises(ValueError, match=rf"{count} image placeholders.*\[4\]"):
            llm.add_request([1, START, *[IMAGE] * count, END], mm_inputs=mm_inputs)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    two = prompt(small, picture(56, 140)).mm_inputs
    for string, given in [(f"type <|image_pad|> here {mark}", mm_inputs), (mark, two), (mark * 2, mm_inputs),
                          (mark, None), ("none", mm_inputs)]:
        with pytest.raises(ValueError, match="placeholder"):
            llm.add_request(string, mm_inputs=given)
    with pytest.raises(ValueError):
        llm.generate(["fine", mark], greedy(2), use_tqdm=False)
    assert llm.is_finished()


# ---------------------------------------------------------------- room for images

def test_image_larger_than_the_step_budget_and_the_encoder_cache(folder, oracle):
    words = prompt(text(5), picture(560, 560), text(5))
    for ratio, times in ((0.2, 1), (0.0, 2)):
        with make_llm(folder, max_num_batched_tokens=256, encoder_cache_ratio=ratio) as llm:
            with encoded_grids(llm) as grids:
                check_all(llm, oracle, words)
            assert len(grids) == times      # without a cache once for each of its two chunks


def test_two_images_of_which_the_encoder_cache_holds_one(folder, oracle):
    """450 rows for 400 + 400, in one prompt, and in two requests while a third fills the KV pool."""
    one, two = picture(560, 560), picture(560, 560, seed=1)
    with make_llm(folder, block_size=16, num_kvcache_blocks=120, max_model_len=1900,
                  encoder_cache_ratio=encoder_ratio(120, 28)) as llm:
        assert llm.runner.encoder_num_blocks == 28
        check_all(llm, oracle, prompt(text(5), one, text(3), two, text(5)))
        llm.reset_caches()
        check_all(llm, oracle, prompt(text(1500)), prompt(text(5), one, text(5)), prompt(text(6), two, text(5)))
        llm.reset_caches()
        check_all(llm, oracle, *(prompt(*shown, text(5)) for shown in ([one], [two], [one, two], [two, one])))


def test_thirty_images_through_a_small_encoder_cache(folder, oracle):
    images = [picture(56, 140, seed) for seed in range(30)]
    with make_llm(folder, block_size=16, num_kvcache_blocks=40, max_model_len=600,
                  encoder_cache_ratio=encoder_ratio(40, 5)) as llm:
        for i in range(0, 30, 3):
            check_all(llm, oracle, *(prompt(text(20, seed=j), images[j], text(4)) for j in range(i, i + 3)))
            with pytest.raises(ValueError):
                llm.add_request([1, IMAGE], mm_inputs=prompt(images[i]).mm_inputs)
        for j in (0, 1, 2):
            check_all(llm, oracle, prompt(text(9, seed=j), images[j], text(4)))


def test_large_image_fits_or_is_refused_with_the_numbers(folder):
    large = prompt(text(5), picture(1120, 1120), text(5))
    with make_llm(folder) as llm:
        assert [len(output["token_ids"]) for output in generate(llm, large, large)] == [8, 8]
    with make_llm(folder, max_model_len=1024) as llm, pytest.raises(ValueError, match=r"1612 tokens.*1024"):
        llm.add_request(large.token_ids, mm_inputs=large.mm_inputs)
