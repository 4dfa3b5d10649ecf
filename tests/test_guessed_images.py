"""Large pixels are hashed while the device works on a guess of what they are; what a wrong guess did, nobody sees."""
from __future__ import annotations

from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.engine import intake
from nanovllm.image.hashing import PendingHash
from tests.engines import assert_idle, assert_right, greedy, make_llm
from tests.oracle import Oracle
from tests.prompts import Prompt, picture, prompt, text, video

A, B, C = (picture(84, 112, seed) for seed in range(3))
LOGPROBS = greedy(6, logprobs=-1)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[PendingHash]:
    """Small pixels are guessed, too, and all have one fingerprint; the hashes that were not waited for at once."""
    started: list[PendingHash] = []

    def start(*args: Any) -> PendingHash:
        started.append(PendingHash(*args))
        return started[-1]

    monkeypatch.setattr(intake, "MIN_GUESS_BYTES", 0)
    monkeypatch.setattr(intake, "fingerprint", lambda pixels, grid: 5)
    monkeypatch.setattr(intake, "PendingHash", start)
    return started


@pytest.fixture(params=[dict(overlap=False), dict(overlap=True), dict(overlap=True, max_num_batched_tokens=9)], ids=str)
def engine(request: pytest.FixtureRequest, folder: Any) -> Any:
    with make_llm(folder, block_size=4, **request.param) as llm:
        yield llm


def ask(llm: LLM, oracle: Oracle, *prompts: Prompt, ratio: float = 0.0, max_tokens: int = 6) -> list[Any]:
    """Right outputs of one call."""
    params = greedy(max_tokens, logprobs=-1, recompute_ratio=ratio)
    outputs = llm.generate([each.token_ids for each in prompts], params, [each.mm_inputs for each in prompts],
                           use_tqdm=False)
    for each, output in zip(prompts, outputs):
        assert_right(oracle, each, output)
    assert_idle(llm)
    return outputs


def abort_after_a_step(llm: LLM, asked: Prompt) -> None:
    """As a callback or a signal handler may do while `generate` runs."""
    request = llm.build_request(asked.token_ids, LOGPROBS, asked.mm_inputs, 0.0, may_guess=True)
    llm.queue(request)
    llm.step()
    llm.abort(request.seq.seq_id)
    while not llm.is_finished():
        llm.step()
    assert_idle(llm)


def test_a_right_guess_hits_what_is_cached(engine: LLM, oracle: Oracle, hashes: list[PendingHash]) -> None:
    [first] = ask(engine, oracle, prompt(text(5), A, text(4)))
    assert not hashes and first["num_cached_tokens"] == 0
    [again] = ask(engine, oracle, prompt(text(5), A, text(7, 1)))
    assert len(hashes) == 1 and again["num_cached_tokens"] >= 16 and again["hash_time"] > 0
    assert engine.stats()["encoder_misses"] == 1 and engine.stats()["requests"] == 2


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_a_wrong_guess_leaves_nothing_behind(engine: LLM, oracle: Oracle, hashes: list[PendingHash],
                                             ratio: float) -> None:
    """B is taken for A: exact all the same, since it is computed in full. Then nothing more of that fingerprint is
    guessed."""
    ask(engine, oracle, prompt(text(5), A, text(4)))
    [other] = ask(engine, oracle, prompt(text(5), B, text(4)), ratio=ratio)
    assert len(hashes) == 1 and (other["num_reused_tokens"], other["num_cached_tokens"]) == (0, 4)
    [back] = ask(engine, oracle, prompt(text(5), A, text(4)))
    assert len(hashes) == 1 and back["num_cached_tokens"] >= 16
    stats = engine.stats()
    assert (stats["requests"], stats["reused_tokens"], stats["image_kv_entries"]) == (3, 0, 2)
    assert stats["cached_tokens"] == 4 + back["num_cached_tokens"] and stats["preemptions"] == 0


def test_right_and_wrong_guesses_of_one_call(engine: LLM, oracle: Oracle, hashes: list[PendingHash]) -> None:
    ask(engine, oracle, prompt(text(5), A, text(4)))
    ask(engine, oracle, prompt(text(3, 2)), prompt(text(5), B, text(4)), prompt(text(6), A, text(2)),
        prompt(text(2), C, text(3), A, text(1)), prompt(text(5), A, text(4)))
    assert len(hashes) == 5 and engine.stats()["image_kv_entries"] >= 3
    ask(engine, oracle, prompt(text(5), A, text(4)), prompt(text(5), B, text(4)), prompt(text(5), C, text(4)))


def test_pixels_that_may_change_meanwhile_are_hashed_at_once(engine: LLM, oracle: Oracle,
                                                             hashes: list[PendingHash]) -> None:
    """The caller of `add_request` goes on, and may fill the same array with the next picture."""
    ask(engine, oracle, prompt(text(5), A, text(4)))
    for each in (A, B):
        one = prompt(text(5), each, text(4))
        engine.add_request(one.token_ids, LOGPROBS, one.mm_inputs)
        outputs: list[Any] = []
        while not outputs:
            outputs = engine.step()
        assert_right(oracle, one, outputs[0])
    assert not hashes


def test_an_abort_and_an_error_before_the_guess_is_confirmed(engine: LLM, oracle: Oracle, hashes: list[PendingHash],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    ask(engine, oracle, prompt(text(5), A, text(4)))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "collect", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(engine, oracle, prompt(text(5), B, text(4)))
    assert_idle(engine)
    abort_after_a_step(engine, prompt(text(5), C, text(4)))
    ask(engine, oracle, prompt(text(5), C, text(4)), prompt(text(5), B, text(4)))


def test_an_abort_between_chunks_leaves_no_rows_under_the_guessed_key(engine: LLM, oracle: Oracle,
                                                                      hashes: list[PendingHash]) -> None:
    """B, taken for A whose rows are gone, is aborted while a step encodes it: its rows are not A's."""
    ask(engine, oracle, prompt(text(5), A, text(4)))
    engine.reset_caches()
    abort_after_a_step(engine, prompt(text(5), B, text(20)))
    ask(engine, oracle, prompt(text(5), A, text(4)))


def test_a_guess_does_not_decide_whether_pixels_are_missing(engine: LLM, oracle: Oracle,
                                                            hashes: list[PendingHash]) -> None:
    """Behind one video a named still is in the prefix cache, behind another one it is not: refused before any runs."""
    seen, other = (prompt(text(2), video(1, 56, 56, 1.0, seed), A, text(4)) for seed in (3, 4))
    engine.generate([seen.token_ids], LOGPROBS, [dict(seen.mm_inputs or {}, image_hashes=[7])], use_tqdm=False)
    engine.scheduler.encoder_cache.clear()
    named = dict(other.mm_inputs or {}, image_hashes=[7], pixel_values=None)
    with pytest.raises(ValueError, match="pass its pixel_values"):
        engine.generate([other.token_ids], LOGPROBS, [named], use_tqdm=False)
    again = dict(seen.mm_inputs or {}, image_hashes=[7], pixel_values=None)
    [output] = engine.generate([seen.token_ids], LOGPROBS, [again], use_tqdm=False)
    assert_right(oracle, seen, output)


def test_preemption_around_wrong_guesses(folder: Any, oracle: Oracle, hashes: list[PendingHash]) -> None:
    prompts = [prompt(text(5), A, text(4)), prompt(text(3, 2)), prompt(text(5), B, text(4)),
               prompt(text(6), C, text(2))]
    with make_llm(folder, block_size=4, num_kvcache_blocks=24, overlap=True) as llm:
        ask(llm, oracle, prompts[0])
        ask(llm, oracle, *prompts, max_tokens=24)
        assert len(hashes) == 3 and llm.stats()["preemptions"] > 0
