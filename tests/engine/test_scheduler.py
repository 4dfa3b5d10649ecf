"""Admission, chunks, failures and ends of requests, on the simulated device that checks every KV slot."""
from __future__ import annotations

import pytest

from nanovllm.sampling_params import SamplingParams
from tests.engine.harness import Harness
from tests.engine.reference import EOS, Picture, greedy, is_solo, make_sequence, prompt, solo_tokens

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


# ---------------------------------------------------------------- chunks

@OVERLAP
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 150])
def test_chunked_prefill_equals_whole(length: int, overlap: bool) -> None:
    chunked = Harness(block_size=16, max_num_batched_tokens=64, max_model_len=256, overlap=overlap)
    seq = chunked.generate(prompt(length), max_tokens=8)
    assert is_solo(seq, prompt(length)) and len(seq.completion_token_ids) == 8
    assert chunked.device.num_computed == length + 7


@OVERLAP
def test_decodes_go_on_while_a_prompt_is_computed_in_chunks(overlap: bool) -> None:
    engine = Harness(max_num_batched_tokens=8, overlap=overlap)
    short = engine.add(prompt(3), max_tokens=9)
    long = engine.add(prompt(40, 1), max_tokens=4)
    together = 0
    while not long.completion_token_ids:
        seqs = engine.step()
        together += len(seqs) == 2
    assert together >= 4 and short.num_completion_tokens >= 4
    engine.run()
    assert is_solo(short, prompt(3)) and is_solo(long, prompt(40, 1))


def test_schedule_says_whether_prompt_tokens_are_computed() -> None:
    engine = Harness(max_num_batched_tokens=4)
    engine.add(prompt(6), max_tokens=3)
    phases = []
    while not engine.scheduler.is_finished():
        seqs, is_prefill = engine.scheduler.schedule()
        phases.append(is_prefill)
        engine.scheduler.postprocess(seqs, [1])
    assert phases == [True, True, False, False]


@OVERLAP
def test_the_last_chunk_may_be_one_token(overlap: bool) -> None:
    picture = Picture(1, 21)
    engine = Harness(max_num_batched_tokens=12, overlap=overlap)
    seq = engine.generate([1, 2, picture, 3], max_tokens=3)       # 24 tokens and one more
    engine.generate([1, 2, picture, 4, 5], max_tokens=3)
    assert seq.completion_token_ids == solo_tokens([1, 2, picture, 3], greedy(), 3)


# ---------------------------------------------------------------- order

def test_no_more_sequences_run_than_rows() -> None:
    engine = Harness(max_num_seqs=2)
    seqs = [engine.add(prompt(5, i)) for i in range(5)]
    most = 0
    while not engine.scheduler.is_finished():
        most = max(most, len(engine.step()))
    assert most == 2 and all(is_solo(seq, prompt(5, i)) for i, seq in enumerate(seqs))


def test_waiting_requests_come_in_order_of_arrival() -> None:
    engine = Harness(num_blocks=6)
    seqs = [engine.add(prompt(n, n)) for n in (12, 16, 4)]       # the third would fit beside the first
    engine.step()
    assert engine.scheduler.running == [seqs[0]]
    engine.run()
    assert all(seq.finish_reason == "length" for seq in seqs)


# ---------------------------------------------------------------- refusals and limits

@pytest.mark.parametrize("length, tokens", [(62, 2), (63, 1), (64, None), (65, None)])
def test_prompts_around_max_model_len(length: int, tokens: int | None) -> None:
    engine = Harness(max_model_len=64)
    if tokens is None:
        with pytest.raises(ValueError, match=f"{length} tokens.*max_model_len is 64.*shorten it to 63"):
            engine.add(prompt(length))
    else:
        seq = engine.add(prompt(length))
        engine.run(max_steps=10)
        assert (seq.num_completion_tokens, seq.finish_reason) == (tokens, "length")
    assert engine.generate(prompt(5, 3)).num_completion_tokens == 4


@pytest.mark.parametrize("max_tokens", [None, 10**9])
def test_max_tokens_is_clamped_to_the_room_left(max_tokens: int | None) -> None:
    engine = Harness(max_model_len=20)
    seq = engine.generate(prompt(12), max_tokens=max_tokens)
    assert (len(seq), seq.finish_reason) == (20, "length") and is_solo(seq, prompt(12))


def test_a_request_beyond_the_whole_pool_is_refused_with_both_numbers() -> None:
    engine = Harness(num_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match=r"needs 16 KV blocks \(14 prompt \+ 50 new tokens\) but the pool has 4"):
        engine.add(prompt(14), max_tokens=500)
    with pytest.raises(ValueError, match="needs 5 KV blocks"):
        engine.add(prompt(14), max_tokens=4)
    assert engine.generate(prompt(14), max_tokens=3).num_completion_tokens == 3
    assert not engine.scheduler.waiting


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Harness().add([])


# ---------------------------------------------------------------- ends

def test_end_of_sequence_ids_end_it_unless_ignored() -> None:
    parts = next(parts for i in range(1600) if solo_tokens(parts := [i % 40, i // 40], greedy(), 2)[1] == EOS)
    engine = Harness()
    stopped = engine.generate(parts, max_tokens=9, ignore_eos=False)
    assert (stopped.completion_token_ids[1:], stopped.finish_reason) == ([EOS], "stop")
    ignoring = engine.generate(parts, max_tokens=9)
    assert (ignoring.num_completion_tokens, ignoring.finish_reason) == (9, "length")


@OVERLAP
def test_stop_token_ids_hold_with_ignore_eos(overlap: bool) -> None:
    tokens = solo_tokens(prompt(5), greedy(), 12)
    stop = tokens[5]
    seq = Harness(overlap=overlap).generate(prompt(5), max_tokens=12, stop_token_ids=[stop])
    assert seq.completion_token_ids == tokens[:tokens.index(stop) + 1] and seq.finish_reason == "stop"


@OVERLAP
def test_no_stop_id_before_min_tokens(overlap: bool) -> None:
    """Every id but two would end it."""
    seq = Harness(overlap=overlap).generate(prompt(5), max_tokens=12, min_tokens=5, ignore_eos=False,
                                            stop_token_ids=[i for i in range(40) if i not in (11, 12)])
    assert set(seq.completion_token_ids[:5]) <= {11, 12} and seq.num_completion_tokens > 5
    assert seq.finish_reason == "length" or seq.completion_token_ids[-1] not in (11, 12)


def test_a_seed_is_drawn_only_where_none_is_given() -> None:
    given = [Harness(seed=5).add(prompt(3), seed=9).seed for _ in range(2)]
    drawn = [[engine.add(prompt(3)).seed for _ in range(2)] for engine in (Harness(seed=5), Harness(seed=5))]
    assert given == [9, 9] and drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


# ---------------------------------------------------------------- aborts and failures

@OVERLAP
def test_abort_at_every_moment(overlap: bool) -> None:
    for num_steps in range(8):
        engine = Harness(num_blocks=16, max_num_batched_tokens=6, overlap=overlap)
        picture = Picture(1, 6)
        seqs = [engine.add([1, 2, picture, i], max_tokens=9) for i in range(3)]
        for _ in range(num_steps):
            engine.step()
        assert engine.scheduler.abort(seqs[1].seq_id)
        engine.run()
        assert seqs[1].finish_reason == "abort" and not seqs[1].block_table
        assert all(seqs[i].completion_token_ids == solo_tokens([1, 2, picture, i], greedy(), 9) for i in (0, 2))
        assert not engine.scheduler.abort(seqs[1].seq_id)


def test_an_abort_that_waits_for_its_id_survives_a_failed_step() -> None:
    engine = Harness(overlap=True)
    seq = engine.add(prompt(5))
    engine.step()
    assert seq.num_pending == 1
    engine.fail_step(lambda: engine.scheduler.abort(seq.seq_id))
    assert seq.finish_reason == "abort"
    engine.check_all_returned()


@OVERLAP
@pytest.mark.parametrize("num_steps", range(5))
def test_a_failed_step_publishes_nothing(num_steps: int, overlap: bool) -> None:
    engine = Harness(max_num_batched_tokens=10, overlap=overlap)
    parts = [*prompt(9), Picture(1, 9), *prompt(8, 3)]
    seq = engine.add(parts)
    for _ in range(num_steps):
        engine.step()
    computed = seq.num_computed
    engine.fail_step()
    assert seq.num_computed == computed == seq.num_planned
    engine.scheduler.abort(seq.seq_id)
    again = engine.generate(parts)
    assert again.num_cached_tokens <= computed and again.completion_token_ids == solo_tokens(parts, greedy(), 4)


def test_a_dropped_request_of_a_failed_first_step_leaves_no_hits() -> None:
    engine = Harness(num_blocks=100, max_model_len=400, max_num_batched_tokens=512)
    seq = engine.add(prompt(300))
    engine.fail_step()
    engine.scheduler.abort(seq.seq_id)
    again = engine.generate(prompt(300))
    assert again.num_cached_tokens == 0 and is_solo(again, prompt(300))


def test_of_two_equal_prompts_in_one_step_the_survivor_is_found() -> None:
    engine = Harness(overlap=True)
    first, second = (engine.add(prompt(9)) for _ in range(2))
    assert engine.step() == [first, second]
    engine.scheduler.abort(first.seq_id)
    engine.run()
    third = engine.generate(prompt(9))
    assert third.num_cached_tokens == 8 and is_solo(second, prompt(9)) and is_solo(third, prompt(9))


def test_a_sequence_with_wrong_numbers_ends_alone_and_leaves_nothing_behind() -> None:
    engine = Harness()
    parts = [1, 2, Picture(1, 9), 3]
    bad, good = engine.add(parts, max_tokens=6), engine.add(prompt(5), max_tokens=6)
    for _ in range(3):
        engine.step()
    engine.scheduler.fail(bad, "not finite")
    assert (bad.finish_reason, bad.error) == ("error", "not finite")
    engine.run()
    assert is_solo(good, prompt(5)) and not engine.manager.image_kv_cache
    assert engine.generate(parts).num_cached_tokens == 0


def test_finished_sequences_are_handed_out_once() -> None:
    engine = Harness()
    seqs = [engine.generate(prompt(3), max_tokens=1) for _ in range(2)]
    assert engine.scheduler.take_finished() == seqs and engine.scheduler.take_finished() == []


def test_scheduling_nothing_is_no_step() -> None:
    engine = Harness()
    assert engine.scheduler.schedule() == ([], False) and not engine.scheduler.in_flight


def test_params_are_not_changed_by_the_clamp() -> None:
    params = SamplingParams(max_tokens=10**9)
    seq = make_sequence(prompt(3), params)
    Harness(max_model_len=20).scheduler.add(seq)
    assert seq.token_limit == 20 and params.max_tokens == 10**9
