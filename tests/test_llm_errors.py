"""Bad requests, failing steps and the end of engines: nothing is left behind, and what goes on is right."""
from __future__ import annotations

import gc
import weakref
from itertools import count

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.llm import _Progress
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import assert_idle, assert_right, check, generate, greedy, make_llm, run
from tests.oracle import Oracle
from tests.prompts import TOKENIZER, picture, prompt, text

VOCAB = len(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder) as llm:
        yield llm
        assert_idle(llm)


def assert_held_by(llm, seq_ids):
    """Only these requests are there, and only they hold blocks."""
    check(llm)
    known = [*llm.scheduler.running, *llm.scheduler.waiting]
    assert sorted(seq.seq_id for seq in known) == sorted(llm.requests) == sorted(seq_ids)


# ---------------------------------------------------------------- errors

def test_bad_request_is_refused_before_any_is_added(llm):
    before = llm.stats()["computed_tokens"]
    good = text(5)
    for bad in ("", [], [VOCAB], [-1], [2**40], [1.5], [True]):
        with pytest.raises(ValueError):
            llm.generate([good, bad, good], greedy(2), use_tqdm=False)
    for params in ([greedy(2)], [greedy(2)] * 3):
        with pytest.raises(ValueError, match="2 prompts"):
            llm.generate([good, good], params, use_tqdm=False)
    with pytest.raises(ValueError, match="mm_inputs"):
        llm.generate([good, good], greedy(2), mm_inputs=[None], use_tqdm=False)
    for params in ({"max_tokens": 2}, [None], [2], SamplingParams, "greedy"):
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.generate([good], params, use_tqdm=False)
        with pytest.raises(TypeError, match="SamplingParams"):
            llm.add_request(good, params)
    with pytest.raises(ValueError, match="stop_token_ids"):
        generate(llm, good, stop_token_ids=[VOCAB])
    assert llm.is_finished() and llm.stats()["computed_tokens"] == before


def test_numbers_beyond_every_machine_word_are_as_good_as_large_ones(llm):
    [large], [larger] = (llm.generate(text(4090), SamplingParams(
        max_tokens=None, seed=1, top_k=number, min_tokens=number), use_tqdm=False) for number in (10**6, 2**80))
    assert large["token_ids"] == larger["token_ids"] and len(larger["token_ids"]) == 6


@pytest.mark.parametrize("where", ["launch", "collect", "progress"])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_error_in_the_middle_of_generate_leaves_the_engine_usable(folder, monkeypatch, where, at, overlap):
    words = [prompt(text(40, seed), picture(112, 112, seed), text(5)) for seed in range(3)]
    with make_llm(folder, block_size=16, max_num_batched_tokens=64, recompute_ratio=0.2, overlap=overlap) as llm:
        other = llm.add_request(text(9), greedy(20, repetition_penalty=1.5))
        owner, name = (_Progress, "update") if where == "progress" else (llm.runner, where)
        work, steps = getattr(owner, name), count()

        def failing(*args):
            if next(steps) == at:
                raise KeyboardInterrupt
            return work(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.raises(KeyboardInterrupt):
                generate(llm, *words)
        assert_held_by(llm, [other])
        outputs = generate(llm, *words)
        last = []
        while not llm.is_finished():
            last += llm.step()
        assert_idle(llm)
        assert last[0]["seq_id"] == other and len(last[0]["token_ids"]) == 20
    with make_llm(folder) as fresh:
        penalised = generate(fresh, text(9), max_tokens=20, repetition_penalty=1.5)
        assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in generate(fresh, *words)]
        assert last[0]["token_ids"] == penalised[0]["token_ids"]


def test_interrupt_inside_a_layer_publishes_nothing(folder, monkeypatch):
    """The pass stops half way: KV of the first layers is written, that of the others is not."""
    words = prompt(text(300))
    with make_llm(folder) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm.runner.model.model.layers[1], "forward", lambda *args: 1 / 0)
            seq_id = llm.add_request(words.token_ids, greedy(8))
            with pytest.raises(ZeroDivisionError):
                llm.step()
        llm.abort(seq_id)
        assert [output["finish_reason"] for output in llm.step()] == ["abort"]
        assert_idle(llm)
        again, = run(llm, [words], greedy(8))
    with make_llm(folder) as fresh:
        expected, = run(fresh, [words], greedy(8))
    assert again["token_ids"] == expected["token_ids"] and again["num_cached_tokens"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_step_can_be_tried_again_after_an_error(folder, monkeypatch, overlap):
    words = prompt(text(30), picture(112, 112), text(5))
    with make_llm(folder, block_size=16, overlap=overlap) as llm:
        expected, = run(llm, [words], greedy(8))
        llm.reset_caches()
        seq_id = llm.add_request(words.token_ids, greedy(8), words.mm_inputs)
        for layer in (0, 2):
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(llm.runner.model.model.layers[layer], "forward", lambda *args: 1 / 0)
                llm.step()
        outputs = []
        while not llm.is_finished():
            outputs += llm.step()
        assert [output["seq_id"] for output in outputs] == [seq_id]
        assert outputs[0]["token_ids"] == expected["token_ids"]
        assert_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_finite_end_only_their_request(folder, monkeypatch, overlap):
    words = [prompt(text(20, seed)) for seed in range(3)]
    with make_llm(folder, block_size=16, overlap=overlap) as llm:
        expected = run(llm, words, greedy(8))
        llm.reset_caches()
        compute_logits, steps = llm.runner.model.compute_logits, count()

        def poisoned(hidden):
            logits = compute_logits(hidden)
            if next(steps) == 2:
                logits[1] = float("nan")
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(llm.runner.model, "compute_logits", poisoned)
            outputs = run(llm, words, greedy(8))
        assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
        assert "not finite" in outputs[1]["error"] and outputs[1]["token_ids"] == expected[1]["token_ids"][:2]
        for i in (0, 2):
            assert outputs[i]["token_ids"] == expected[i]["token_ids"] and "error" not in outputs[i]
        again, = run(llm, words[1:2], greedy(8))
        assert again["token_ids"] == expected[1]["token_ids"] and again["num_cached_tokens"] == 0


# ---------------------------------------------------------------- lives and deaths of engines

def test_two_engines_side_by_side_see_the_same_image(tmp_path):
    words = prompt(text(9), picture(112, 112), text(5))
    folders = [make_qwen2_5_vl(tmp_path / str(size), hidden_size=size) for size in (64, 128)]
    engines = [make_llm(folder) for folder in folders]
    outputs = [[generate(llm, words, logprobs=-1)[0] for llm in engines] for _ in range(2)]
    engines[0].exit()
    last, = generate(engines[1], words)
    assert last["token_ids"] == outputs[0][1]["token_ids"]
    for folder, cold, warm in zip(folders, *outputs):
        for output in (cold, warm):
            assert_right(Oracle(folder), words, output)


def test_engine_nobody_refers_to_frees_its_memory_at_once(folder):
    llm = make_llm(folder)
    generate(llm, prompt(text(9), picture(112, 112), text(5)))
    with pytest.raises(ValueError):
        generate(llm, [])
    watched = [weakref.ref(x) for x in (llm.runner, llm.runner.model, llm.runner.kv_cache, llm.scheduler,
                                        llm.runner.encoder_cache.rows)]
    gc.disable()        # nothing may wait for the collector of cycles
    try:
        del llm
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("overlap", [False, True])
def test_pixels_are_let_go_with_their_request(folder, overlap):
    words = prompt(text(9), picture(112, 112), text(5))
    with make_llm(folder, overlap=overlap) as llm:
        mm_inputs = words.mm_inputs
        watched = weakref.ref(mm_inputs["pixel_values"])
        llm.generate(words.token_ids, greedy(4), mm_inputs, use_tqdm=False)
        assert watched() is mm_inputs["pixel_values"]
        del mm_inputs
        assert watched() is None


def test_exit_gives_memory_back_and_may_be_called_again(folder):
    llm = make_llm(folder)
    llm.add_request(text(5), greedy(4))
    watched = [weakref.ref(x) for x in (llm.runner.model, llm.runner.kv_cache)]
    llm.exit()
    llm.exit()
    assert [ref() for ref in watched] == [None, None]
    for use in (lambda: llm.add_request(text(5)), lambda: llm.generate([text(5)], use_tqdm=False), llm.step):
        with pytest.raises(RuntimeError, match="exit"):
            use()


def test_context_manager_closes_also_after_an_error(folder):
    with pytest.raises(ZeroDivisionError), make_llm(folder) as llm:
        assert isinstance(llm, LLM)
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="exit"):
        llm.generate("what", use_tqdm=False)


def test_progress_bar_shows_both_speeds(llm, capsys):
    llm.generate([text(5), text(6)], greedy(3))
    shown = capsys.readouterr().err
    assert "2/2" in shown and "prefill" in shown and "decode" in shown and "tok/s" in shown
    llm.generate([text(5)], greedy(3), use_tqdm=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
