"""Image KV reuse among requests that share a batch, a small pool or a name, on a real model."""
from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm.engine.block_manager import BlockManager
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import (
    assert_idle,
    assert_near,
    assert_right,
    check,
    encoded_grids,
    greedy,
    make_llm,
    run,
)
from tests.oracle import Oracle, ReuseOracle
from tests.prompts import Picture, Prompt, picture, prompt, text

A, B = picture(112, 112, 1), picture(140, 140, 2)        # 16 and 25 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


def foreseen(oracle: Oracle, ratio: float, prompts: list[Prompt], outputs: list) -> None:
    """The outputs are those of requests that came one after the other, nothing being evicted."""
    reuse = ReuseOracle(oracle)
    for words, output in zip(prompts, outputs):
        assert_near(reuse.logprobs(words, output["token_ids"], ratio), output)
        assert output["num_reused_tokens"] == reuse.num_reused


@pytest.mark.parametrize("budget", [16384, 64, 11])
@pytest.mark.parametrize("overlap", [False, True])
def test_four_requests_with_one_new_image_compute_it_once(folder, oracle, budget, overlap):
    prompts = [prompt(text(10 + 7 * i, i), B, text(5, i)) for i in range(4)]
    with make_llm(folder, block_size=16, recompute_ratio=0.1, enable_prefix_caching=False, overlap=overlap,
                  max_num_batched_tokens=budget) as llm:
        with encoded_grids(llm) as grids:
            outputs = run(llm, prompts, greedy(4, logprobs=-1))
        assert grids == [B.grid]
        reused = 25 - 3
        assert [output["num_reused_tokens"] for output in outputs] == [0, reused, reused, reused]
        # each token but the last is computed, of the images all rows once and three rows three times
        assert llm.stats()["computed_tokens"] == sum(len(words) + 3 for words in prompts) - 3 * reused
        assert [output["vit_time"] > 0 for output in outputs] == [True, False, False, False]
    foreseen(oracle, 0.1, prompts, outputs)


@pytest.mark.parametrize("budget", [16384, 20])
def test_batch_of_images_new_and_known_in_any_order(folder, oracle, budget):
    prompts = [prompt(text(9), A, text(5)), prompt(text(20, 1), A, B, text(4)), prompt(text(3, 2), B, A, text(6)),
               prompt(text(5, 3), B, B, text(2)), prompt(A, text(8), B, text(3)), prompt(text(33))]
    with make_llm(folder, block_size=16, recompute_ratio=0.2, enable_prefix_caching=False,
                  max_num_batched_tokens=budget) as llm:
        outputs = run(llm, prompts, greedy(4, logprobs=-1))
    foreseen(oracle, 0.2, prompts, outputs)
    assert [output["num_reused_tokens"] for output in outputs] == [0, 12, 0, 20 + 20, 12 + 20, 0]


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_request_reuses_the_image_again(folder, oracle, overlap):
    """The donor still runs, and so keeps its entry, while the other one is preempted for it."""
    donor, other = prompt(text(9), B, text(5)), prompt(text(22, 1), B, text(7))
    blocks = -(-len(donor) // 16) + -(-len(other) // 16) + 1
    with make_llm(folder, block_size=16, recompute_ratio=0.1, enable_prefix_caching=False, overlap=overlap,
                  num_kvcache_blocks=blocks) as llm:
        outputs = run(llm, [donor, other], greedy(30, logprobs=-1))
        assert llm.stats()["preemptions"] > 0
    foreseen(oracle, 0.1, [donor, other], outputs)


def test_pool_that_evicts_entries_all_the_time_stays_right(folder, oracle):
    """Full ratio for half of the requests: these are exact whatever was evicted."""
    images = [picture(112, 84, seed) for seed in range(9)]
    with make_llm(folder, block_size=16, recompute_ratio=0.2, num_kvcache_blocks=14, max_model_len=200,
                  max_num_batched_tokens=40, overlap=True) as llm:
        running: dict[int, Prompt] = {}
        for i in range(60):
            words = prompt(text(i % 13, i), images[i * i % 9], text(3), images[(i + 1) % 9], text(4))
            seq_id = llm.add_request(words.token_ids, greedy(3, logprobs=-1, recompute_ratio=(None, 1.0)[i % 2]),
                                     words.mm_inputs)
            if i % 2:
                running[seq_id] = words
            if i % 3 == 2:
                llm.abort(seq_id)
            for output in llm.step():
                _check_exact(oracle, running, output)
            check(llm)
        while not llm.is_finished():
            for output in llm.step():
                _check_exact(oracle, running, output)
            check(llm)
        assert_idle(llm)
        stats = llm.stats()
        assert stats["image_kv_evictions"] > 10 and stats["image_kv_hits"] > 0 and not running


def _check_exact(oracle, running, output):
    words = running.pop(output["seq_id"], None)
    if words is not None and output["finish_reason"] != "abort":
        assert output["finish_reason"] == "length"
        assert_right(oracle, words, output)


def test_one_forged_digest_of_two_sizes_never_mixes(folder, oracle, monkeypatch):
    monkeypatch.setattr("nanovllm.image.inputs.content_hash", lambda pixels, grid, threads: 5)
    tall = Picture((1, 16, 4), A.pixels)            # as many tokens as A
    assert tall.num_tokens == A.num_tokens
    for caching in (False, True):
        with make_llm(folder, block_size=16, recompute_ratio=0.1, enable_prefix_caching=caching) as llm:
            for image in (A, tall, B):
                words = prompt(text(20), image, text(5))
                output, = run(llm, [words], greedy(4, logprobs=-1))
                assert_right(oracle, words, output)
                assert output["num_reused_tokens"] == 0 and output["vit_time"] > 0


def test_block_keys_of_one_hash_with_reuse(folder, monkeypatch):
    class OneHash(tuple):
        def __hash__(self):
            return 0

    prompts = [prompt(text(20, i % 2), (A, B)[i % 3 % 2], text(5, i % 4)) for i in range(10)]

    def answers():
        with make_llm(folder, block_size=16, recompute_ratio=0.1) as llm:
            return [run(llm, [words], greedy(4, logprobs=-1))[0] for words in prompts]

    expected, key = answers(), BlockManager._key
    monkeypatch.setattr(BlockManager, "_key", lambda *args: OneHash(key(*args)))
    forced = answers()
    assert [output["logprobs"] for output in forced] == [output["logprobs"] for output in expected]
    assert sum(output["num_cached_tokens"] for output in forced) > 0


def test_tenants_of_other_salts_share_nothing(folder, oracle):
    words = prompt(text(20), A, text(5))
    with make_llm(folder, block_size=16, recompute_ratio=0.1) as llm:
        for salt, known in (("one", False), ("two", False), (None, False), ("one", True)):
            output, = run(llm, [words], greedy(4, logprobs=-1, cache_salt=salt))
            assert (output["num_cached_tokens"] > 0) == known == (output["vit_time"] == 0)
            assert_right(oracle, words, output)
        moved = prompt(text(31), A, text(5))
        assert run(llm, [moved], greedy(4, cache_salt="three"))[0]["num_reused_tokens"] == 0
        assert run(llm, [moved], greedy(4, cache_salt="two"))[0]["num_reused_tokens"] == 14


# ---------------------------------------------------------------- images by name

def by_name(words: Prompt, *names: int, pixels: bool = True) -> dict:
    kept = words.mm_inputs if pixels else {"image_grid_thw": words.mm_inputs["image_grid_thw"]}
    return kept | {"image_hashes": list(names)}


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_named_image_comes_back_without_pixels(folder, oracle, ratio):
    first, again = prompt(text(20), A, text(5)), prompt(text(20), A, text(7, 1))
    moved = prompt(text(33, 2), A, text(5))
    with make_llm(folder, block_size=16, recompute_ratio=ratio) as llm:
        with pytest.raises(ValueError, match="77"):
            llm.add_request(first.token_ids, greedy(4), by_name(first, 77, pixels=False))
        cold, = llm.generate(first.token_ids, greedy(4, logprobs=-1), by_name(first, 77), use_tqdm=False)
        assert cold["hash_time"] >= 0 and cold["vit_time"] > 0
        warm, = llm.generate(again.token_ids, greedy(4, logprobs=-1), by_name(again, 77, pixels=False),
                             use_tqdm=False)
        assert warm["vit_time"] == 0
        for words, output in ((first, cold), (again, warm)):
            assert_right(oracle, words, output)
        output, = llm.generate(moved.token_ids, greedy(4, logprobs=-1), by_name(moved, 77, pixels=False),
                               use_tqdm=False)
        foreseen(oracle, ratio, [first, moved], [cold, output])
        llm.reset_caches()
        with pytest.raises(ValueError, match="77"):
            llm.add_request(first.token_ids, greedy(4), by_name(first, 77, pixels=False))
        assert_idle(llm)


def test_name_given_to_another_picture_is_a_miss(folder, oracle):
    other = replace(A, pixels=-A.pixels)
    with make_llm(folder, block_size=16, recompute_ratio=0.1) as llm:
        for image in (A, other, A):
            words = prompt(text(20), image, text(5))
            output, = llm.generate(words.token_ids, greedy(4, logprobs=-1), by_name(words, 77), use_tqdm=False)
            assert_right(oracle, words, output)
