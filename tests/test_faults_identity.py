"""Faults that engines of this kind had with the identity of images and with bad input, each tried end to end."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from nanovllm.engine.block_manager import BlockManager
from tests.engines import (
    assert_idle,
    assert_right,
    check_all,
    encoder_ratio,
    generate,
    greedy,
    make_llm,
    run,
)
from tests.prompts import IMAGE, TOKENIZER, Picture, picture, prompt, text

ASKED = greedy(6, logprobs=-1)


def colour(value, height=224, width=224):
    """A picture of one value."""
    grid = (1, height // 14, width // 14)
    return Picture(grid, torch.full((grid[1] * grid[2], 1176), value))


# ---------------------------------------------------------------- identity

def test_images_under_one_text_are_told_apart(llm, oracle):
    red, blue, larger = colour(1.5), colour(-1.5), colour(1.5, 280, 280)
    prompts = [prompt(text(20), *shown, text(5)) for shown in ([red], [blue], [larger], [red, blue], [blue, red])]
    for words in prompts:
        check_all(llm, oracle, words)
    llm.reset_caches()
    outputs = check_all(llm, oracle, *prompts)
    first = [round(output["logprobs"][0][0], 3) for output in outputs]
    assert len(set(first)) == 5
    again, = check_all(llm, oracle, prompts[1])
    assert again["num_cached_tokens"] >= 80


@pytest.mark.parametrize("bits", [16, 32, 63, 127])
def test_digests_that_share_their_low_bits_are_told_apart(llm, oracle, monkeypatch, bits):
    digests = iter([5, 5 + (1 << bits)])
    monkeypatch.setattr("nanovllm.image.inputs.content_hash", lambda pixels, grid, threads: next(digests))
    for seed in (0, 1):
        check_all(llm, oracle, prompt(text(20), picture(112, 112, seed), text(5)))


def test_pixels_changed_in_place_are_another_image(llm, oracle):
    image = picture(112, 112)
    check_all(llm, oracle, prompt(text(20), image, text(5)))
    image.pixels.mul_(-1)
    changed = Picture(image.grid, image.pixels)
    output, = check_all(llm, oracle, prompt(text(20), changed, text(5)))
    assert output["vit_time"] > 0


def test_prefix_keys_of_one_hash_are_told_apart(folder, oracle, monkeypatch):
    """The hash of block keys is a constant, and sums of ids agree: only comparison is left."""
    class OneHash(tuple):
        def __hash__(self):
            return 0

    key = BlockManager._key
    monkeypatch.setattr(BlockManager, "_key", lambda *args: OneHash(key(*args)))
    ids = text(40)
    with make_llm(folder, block_size=16) as llm:
        for pair in ([50, 60], [81, 59], [60, 50]):
            check_all(llm, oracle, prompt([*ids[:4], *pair, *ids]))
        for seed in (0, 1):
            check_all(llm, oracle, prompt(ids, picture(112, 112, seed), text(5)))
        again, = check_all(llm, oracle, prompt(ids, picture(112, 112, 1), text(5)))
        assert again["num_cached_tokens"] == 48


def test_processor_settings_are_part_of_an_image(folder, llm, oracle):
    processor = AutoImageProcessor.from_pretrained(folder)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (448, 448, 3), dtype=np.uint8))
    tokens = []
    for limit in (50176, 200704):
        given = processor(photo, size={"shortest_edge": 56 * 56, "longest_edge": limit}, return_tensors="pt")
        image = Picture(tuple(given["image_grid_thw"][0].tolist()), given["pixel_values"])
        check_all(llm, oracle, prompt(text(5), image, text(5)))
        tokens.append(image.num_tokens)
    assert tokens == [64, 256]


def test_whole_prompt_of_cached_blocks(folder, oracle):
    """512 ids, twice in a row, twice in one batch, and once more while the first is decoding."""
    words, image_last = prompt(text(512)), prompt(text(256), picture(448, 448), marks=False)
    assert len(image_last) == 512
    for each in (words, image_last):
        with make_llm(folder) as llm:
            for _ in range(2):
                check_all(llm, oracle, each)
            check_all(llm, oracle, each, each)
            llm.add_request(each.token_ids, ASKED, each.mm_inputs)
            llm.step()
            llm.step()
            late, = generate(llm, each, max_tokens=6, logprobs=-1)
            assert_right(oracle, each, late)
            assert_right(oracle, each, llm.step()[0])
            assert late["num_cached_tokens"] == 256


# ---------------------------------------------------------------- bad numbers, bad input

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gives_finite_answers(folder, dtype):
    with make_llm(folder, dtype=dtype) as llm:
        for image in (picture(448, 448), colour(2.2, 448, 448)):
            output, = generate(llm, prompt(text(5), image, text(5)), logprobs=-1)
            assert output["finish_reason"] == "length"
            assert np.isfinite([list(row.values()) for row in output["logprobs"]]).all()


def test_image_that_is_not_finite_ends_only_its_request(llm, oracle):
    broken = picture(112, 112, seed=9)
    broken.pixels[3] = float("nan")
    prompts = [prompt(text(20), image, text(5)) for image in (picture(112, 112), broken, picture(112, 112, seed=1))]
    outputs = run(llm, prompts, ASKED)
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    assert outputs[1]["token_ids"] == [] and "finite" in outputs[1]["error"]
    for i in (0, 2):
        assert_right(oracle, prompts[i], outputs[i])
    assert run(llm, prompts[1:2], ASKED)[0]["finish_reason"] == "error"
    assert llm.stats()["image_kv_entries"] == 2


def test_image_of_a_size_that_does_not_merge_is_refused_before_the_others_run(llm, oracle):
    good, odd = prompt(text(5), picture(56, 56), text(5)), {"pixel_values": torch.randn(54, 1176),
                                                             "image_grid_thw": [[1, 3, 18]]}
    with pytest.raises(ValueError, match=r"\(1, 3, 18\)"):
        llm.generate([good.token_ids, [1, IMAGE], good.token_ids], greedy(2),
                     mm_inputs=[good.mm_inputs, odd, good.mm_inputs], use_tqdm=False)
    assert_idle(llm)
    check_all(llm, oracle, good)


def test_fifty_requests_of_which_a_third_end_early_leave_nothing_held(folder):
    images = [picture(56, 140, seed) for seed in range(8)]
    with make_llm(folder, block_size=16, num_kvcache_blocks=24, max_model_len=300, max_num_batched_tokens=40,
                  encoder_cache_ratio=encoder_ratio(24, 4)) as llm:
        room = llm.scheduler.block_manager.pool.num_available
        for i in range(50):
            words = prompt(text(i % 17 + 1, seed=i), images[i % 8], text(2), images[(3 * i + 1) % 8], text(i % 5))
            seq_id = llm.add_request(words.token_ids, greedy(i % 7 + 1), words.mm_inputs)
            if i % 3 == 0:
                with pytest.raises(ValueError):
                    llm.add_request([*words.token_ids, IMAGE], greedy(1), words.mm_inputs)
            llm.step()
            if i % 3 == 1:
                llm.abort(seq_id)
            llm.scheduler.check_integrity()
        while not llm.is_finished():
            llm.step()
        assert_idle(llm)
        assert llm.scheduler.block_manager.pool.num_available == room


def test_empty_prompts_are_refused_and_the_engine_goes_on(llm):
    for empty in ("", [""], [[]], [np.zeros(0, np.int64)]):
        with pytest.raises(ValueError, match="empty|no token"):
            llm.generate(empty, greedy(2), use_tqdm=False)
    with pytest.raises(ValueError, match="placeholder|empty"):
        llm.generate([[]], greedy(2), mm_inputs=[prompt(picture(56, 56)).mm_inputs], use_tqdm=False)
    assert len(generate(llm, TOKENIZER("it is")["input_ids"])[0]["token_ids"]) == 8
