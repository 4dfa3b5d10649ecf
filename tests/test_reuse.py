"""Image KV reuse to the last logit: a dense pass with the same rows put in says what every request must answer."""
from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from nanovllm import LLM
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import assert_near, assert_right, check_all, encoded_grids, greedy, make_llm, run
from tests.oracle import Oracle, ReuseOracle
from tests.prompts import Picture, Prompt, picture, prompt, text, video

A, B, C = picture(112, 112, 1), picture(56, 140, 2), picture(140, 84, 3)        # 16, 10 and 15 tokens
CLIP = video(3, 56, 84, 0.5, 4)                                                 # 18 tokens
SHAPES = {
    "alone": (A,), "moved": (text(5), A, text(9)), "second": (text(3), B, text(2), A, text(4)),
    "third": (A, text(1), B, C, text(6)), "twice": (text(4), A, text(7), A, text(2)), "last": (text(6), B, text(3), A),
    "beside video": (text(2), CLIP, text(3), A, text(5)), "behind video": (A, CLIP, B, text(5)),
    "touching": (text(2), A, B, A, C, text(2)),
}


def shape(name: str, seed: int = 0) -> Prompt:
    """A prompt of a shape, behind some text of its own; `last` and `touching` have no marks."""
    return prompt(text(seed % 5, seed), *SHAPES[name], marks=name not in ("last", "touching"))


class Pair:
    """An engine without prefix cache, and the oracle that foresees it request by request."""

    def __init__(self, llm: LLM, oracle: Oracle, any_ordinal: bool = False) -> None:
        self.llm, self.oracle = llm, ReuseOracle(oracle, any_ordinal)

    def ask(self, words: Prompt, ratio=None, max_tokens: int = 4):
        """The answer of the engine, which is the oracle's."""
        output, = run(self.llm, [words], greedy(max_tokens, logprobs=-1, recompute_ratio=ratio))
        ratio = self.llm.config.recompute_ratio if ratio is None else ratio
        assert_near(self.oracle.logprobs(words, output["token_ids"], ratio), output)
        assert output["num_reused_tokens"] == self.oracle.num_reused
        assert output["num_recomputed_image_tokens"] == self.oracle.num_recomputed
        return output


@pytest.fixture
def pair(folder, oracle):
    """Makes pairs whose engines are closed at the end."""
    engines = []

    def make(any_ordinal=False, **options):
        llm = make_llm(folder, enable_prefix_caching=False, reuse_any_ordinal=any_ordinal,
                       **({"block_size": 16} | options))
        engines.append(llm)
        return Pair(llm, oracle, any_ordinal)

    yield make
    for llm in engines:
        llm.exit()


# ---------------------------------------------------------------- approximate, and exactly as approximate as foreseen

@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ratio", [0.05, 0.5, (0.5, 0.2, 0.0), (1.0, 0.3, 0.3), (1.0, 1.0, 0.01)], ids=str)
def test_every_shape_cold_then_moved(pair, name, ratio):
    both = pair(recompute_ratio=ratio)
    for seed in (0, 3, 4):
        both.ask(shape(name, seed))
    assert both.oracle.num_reused > 0 or max([ratio] if isinstance(ratio, float) else ratio) == 1.0


@pytest.mark.parametrize("any_ordinal", [False, True])
@pytest.mark.parametrize("budget, overlap", [(16384, False), (16384, True), (24, True), (7, False)])
def test_random_requests(pair, any_ordinal, budget, overlap):
    ask_at_random(pair(any_ordinal, recompute_ratio=0.1, max_num_batched_tokens=budget, overlap=overlap), budget)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_random_requests_on_a_gpu(pair, backend, enforce_eager):
    ask_at_random(pair(recompute_ratio=0.1, device="cuda", attention_backend=backend, enforce_eager=enforce_eager,
                       max_num_seqs=4, gpu_memory_utilization=0.1), seed=1)


def ask_at_random(both, seed):
    rng = random.Random(seed)
    for i in range(14):
        parts = [text(rng.randint(0, 30), i)]
        for _ in range(rng.randint(0, 4)):
            parts += [rng.choice((A, A, B, C, CLIP)), text(rng.randint(0, 6), i)]
        if len(words := prompt(*parts, marks=rng.random() < 0.7)) > 0:
            both.ask(words, rng.choice((None, 0.0, 0.3, 1.0, (0.6, 0.6, 0.1), (0.9, 0.0, 0.0))))


def test_image_computed_behind_a_reused_one_gives_way_to_one_behind_exact_text(pair):
    """B is first computed behind reused A, then behind computed C; only then reused where A stands, too."""
    both = pair(recompute_ratio=0.1)
    both.ask(prompt(text(3), A, text(5)))
    both.ask(prompt(text(9), A, text(2), B, text(5)))
    table = both.llm.scheduler.block_manager.image_kv
    assert [entry.exact for variants in table.images.values() for entry in variants.values()] == [True, False]
    both.ask(prompt(text(1), A, B, text(5)))
    both.ask(prompt(text(1), A, B, text(5)), ratio=0.0)
    assert [entry.exact for variants in table.images.values() for entry in variants.values()] == [True, True]
    both.ask(prompt(text(7), A, B, text(5)))


def test_ordinals(pair):
    first, second = prompt(text(2), A, text(5)), prompt(text(2), B, A, text(5))
    own, nearest = pair(recompute_ratio=0.1), pair(any_ordinal=True, recompute_ratio=0.1)
    reused = {both: [both.ask(words)["num_reused_tokens"] for words in (first, second, second, first)]
              for both in (own, nearest)}
    assert reused[own] == [0, 0, 14 + 9, 14] and reused[nearest] == [0, 14, 14 + 9, 14]


def test_video_is_reused_at_its_own_speed_alone(pair, folder, oracle):
    fast = Picture(CLIP.grid, CLIP.pixels, 1.0)
    both = pair(recompute_ratio=0.1)
    for clip, reused in ((CLIP, 0), (fast, 0), (CLIP, 16), (fast, 16)):
        assert both.ask(prompt(text(reused), clip, text(5)))["num_reused_tokens"] == reused
    for ratio, caching in product((0.0, 0.1), (False, True)):
        with make_llm(folder, block_size=16, recompute_ratio=ratio, enable_prefix_caching=caching) as llm:
            check_all(llm, oracle, prompt(text(20), CLIP, text(5)))
            check_all(llm, oracle, prompt(text(20), fast, text(5)))


# ---------------------------------------------------------------- where reuse must change nothing

@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("caching", [False, True])
def test_ratio_one_equals_no_reuse(folder, oracle, name, caching):
    with make_llm(folder, block_size=16, recompute_ratio=1.0, enable_prefix_caching=caching) as llm:
        for seed in (0, 3, 3):
            output, = check_all(llm, oracle, shape(name, seed))
            assert output["num_reused_tokens"] == 0


def test_one_layer_equals_full_prefill_at_any_ratio(tmp_path):
    """In one layer the keys and values of image rows depend on nothing but the image."""
    folder = make_qwen2_5_vl(tmp_path, num_hidden_layers=1)
    oracle = Oracle(folder)
    for ratio, caching in ((0.01, False), (0.3, True)):
        with make_llm(folder, block_size=16, recompute_ratio=ratio, reuse_any_ordinal=True,
                      enable_prefix_caching=caching) as llm:
            for seed, name in enumerate([*SHAPES, *SHAPES]):
                check_all(llm, oracle, shape(name, seed))
            assert llm.stats()["reused_tokens"] > 200


@pytest.mark.parametrize("ratio", [0.01, 0.4, (0.5, 0.0, 0.0)], ids=str)
def test_same_text_before_equals_full_prefill(folder, oracle, ratio):
    with make_llm(folder, block_size=16, recompute_ratio=ratio, enable_prefix_caching=False) as llm:
        for seed in range(3):
            output, = check_all(llm, oracle, prompt(text(20), B, text(3), A, text(7, seed)))
        assert output["num_reused_tokens"] > 0


def test_list_of_equal_numbers_equals_the_number(folder):
    answers = []
    for ratio in (0.3, [0.3] * 3):
        with make_llm(folder, block_size=16, recompute_ratio=ratio, enable_prefix_caching=False) as llm:
            answers.append([run(llm, [shape("third", seed)], greedy(4, logprobs=-1))[0] for seed in range(3)])
    assert [output["logprobs"] for output in answers[0]] == [output["logprobs"] for output in answers[1]]
    assert answers[0][-1]["num_reused_tokens"] == answers[1][-1]["num_reused_tokens"] > 0


def test_reuse_off_after_reuse_on_is_off_to_the_last_bit(folder):
    words = [shape(name, 2) for name in SHAPES]
    with make_llm(folder, block_size=16, recompute_ratio=0.1, enable_prefix_caching=False) as used:
        for seed in range(2):
            run(used, [shape(name, seed) for name in SHAPES], greedy(2))
        assert used.stats()["reused_tokens"] > 0
        after = run(used, words, greedy(4, logprobs=-1, recompute_ratio=0.0))
    with make_llm(folder, block_size=16, enable_prefix_caching=False) as fresh:
        for seed in range(2):       # the same rows in the encoder cache: one call of the tower rounds as it likes
            run(fresh, [shape(name, seed) for name in SHAPES], greedy(2))
        expected = run(fresh, words, greedy(4, logprobs=-1))
    assert [output["logprobs"] for output in after] == [output["logprobs"] for output in expected]


@pytest.mark.parametrize("name", SHAPES)
def test_exact_and_approximate_answers_never_mix_in_the_prefix_cache(folder, oracle, name):
    with make_llm(folder, block_size=16, recompute_ratio=0.02) as llm:
        run(llm, [shape(name, 1)], greedy(4))
        for ratio in (None, 1.0, 0.0, None, 0.5, 0.0, (0.5, 0.5, 0.0), 1.0):
            output, = run(llm, [shape(name, 2)], greedy(4, logprobs=-1, recompute_ratio=ratio))
            if ratio in (0.0, 1.0):
                assert_right(oracle, shape(name, 2), output)


# ---------------------------------------------------------------- prefix cache beside reuse

def test_next_turn_hits_the_blocks_of_its_ratio(folder, oracle):
    with make_llm(folder, block_size=16, recompute_ratio=0.1) as llm:
        run(llm, [prompt(text(3), A, text(5))], greedy(2))
        reuse = ReuseOracle(oracle)
        reuse.logprobs(prompt(text(3), A, text(5)), [0], 0.1)
        turn, answers = prompt(text(40, 1), A, text(9)), []
        for seed in range(3):
            output, = run(llm, [turn], greedy(20, logprobs=-1))
            answers.append(output)
            cached = reuse.last.rows if seed else None
            assert_near(reuse.logprobs(turn, output["token_ids"], 0.1, output["num_cached_tokens"], cached), output)
            last, turn = turn, Prompt(turn.token_ids + output["token_ids"] + text(7, seed), turn.pictures)
        for ratio, cached in ((0.2, 32), (0.0, 32), (0.2, 112), (0.1, 112)):       # exact blocks go before one's own
            output, = run(llm, [last], greedy(4, logprobs=-1, recompute_ratio=ratio))
            assert output["num_cached_tokens"] == cached
            if cached == 112 or ratio == 0.0:
                assert_right(oracle, last, output)
    assert [output["num_cached_tokens"] for output in answers] == [0, 80, 112]
    assert [output["num_reused_tokens"] for output in answers] == [14, 0, 0]


def test_exact_hits_count_towards_the_recomputed_rows(folder, oracle):
    """A block ends 8 rows into the image: the leading ceil(0.1 * 16) = 2 are there, ceil(0.75 * 16) = 12 are not."""
    words = [prompt(text(7), A, text(9, seed)) for seed in range(3)]
    with make_llm(folder, block_size=16, recompute_ratio=0.1) as llm:
        check_all(llm, oracle, words[0])
        with encoded_grids(llm) as grids:
            llm.scheduler.encoder_cache.clear()
            few, = run(llm, [words[1]], greedy(4, logprobs=-1))
            assert grids == []                  # no row of it is computed
            some, = run(llm, [words[2]], greedy(4, logprobs=-1, recompute_ratio=0.75))
            assert grids == [A.grid]
    for output, recomputed, reused in ((few, 0, 8), (some, 4, 4)):
        assert output["num_cached_tokens"] == 16
        assert output["num_recomputed_image_tokens"] == recomputed and output["num_reused_tokens"] == reused
    for each, output in ((words[1], few), (words[2], some)):        # nothing differs before the image
        assert_right(oracle, each, output)


# ---------------------------------------------------------------- keys and values where they lie

def image_kv(llm: LLM, words: Prompt, **params):
    """KV [layers, 2, rows, kv_heads, head_dim] of the first picture in the pool, once the prompt is computed."""
    seq_id = llm.add_request(words.token_ids, greedy(2, **params), words.mm_inputs)
    llm.step()
    seq, = llm.scheduler.running
    assert seq.num_computed == len(words)
    start, shown = words.pictures[0]
    size = llm.config.kvcache_block_size
    slots = [seq.block_table[i // size] * size + i % size for i in range(start, start + shown.num_tokens)]
    kv = llm.runner.kv_cache.flatten(2, 3)[:, :, slots].clone()
    llm.abort(seq_id)
    assert llm.step()[0]["num_reused_tokens"] >= 0
    return kv


@pytest.mark.parametrize("delta", [0, 1, 7, 100, 4000])
def test_layer_zero_of_a_moved_image_is_as_if_computed_there(folder, delta):
    before = 5
    with make_llm(folder, recompute_ratio=0.05, enable_prefix_caching=False) as llm:
        image_kv(llm, prompt(text(before), A, text(4)))
        moved = image_kv(llm, prompt(text(before + delta), A, text(4)))
        assert llm.stats()["image_kv_hits"] == 1
        fresh = image_kv(llm, prompt(text(before + delta), A, text(4)), recompute_ratio=0.0)
    # float32 rounds an angle of 4,000 to 2e-4
    torch.testing.assert_close(moved[0], fresh[0], rtol=0, atol=1e-5 + 3e-7 * delta * fresh[0].abs().max().item())


def test_image_moved_sixteen_times_is_as_if_moved_once(folder):
    with make_llm(folder, block_size=16, recompute_ratio=0.05, enable_prefix_caching=False) as llm:
        clean = image_kv(llm, prompt(text(3), A, text(4)))
        for i in range(15):
            image_kv(llm, prompt(text(5 + 11 * i, i), A, text(4)))
        last = image_kv(llm, prompt(text(200, seed=9), A, text(4)))
        assert llm.stats()["image_kv_hits"] == 16
    with make_llm(folder, block_size=16, recompute_ratio=0.05, enable_prefix_caching=False) as llm:
        assert torch.equal(image_kv(llm, prompt(text(3), A, text(4))), clean)
        assert torch.equal(image_kv(llm, prompt(text(200, seed=9), A, text(4))), last)


def test_blocks_that_line_up_are_shared_not_copied(folder, oracle):
    """32 + 16 rows before and behind the picture's 64 are the same to the block; then it moves by one."""
    large = picture(224, 224)
    with make_llm(folder, block_size=16, recompute_ratio=0.05, enable_prefix_caching=False) as llm:
        tables = []
        for ids in (text(31), text(31, 1), text(32, 1)):
            words = prompt(ids, large, text(4))
            llm.add_request(words.token_ids, greedy(3), words.mm_inputs)
            llm.step()
            tables.append(llm.scheduler.running[-1].block_table)
        assert tables[1][3:6] == tables[0][3:6] and not set(tables[1][:3]) & set(tables[0])
        assert not set(tables[2]) & set(tables[0] + tables[1])
        while not llm.is_finished():
            llm.step()
