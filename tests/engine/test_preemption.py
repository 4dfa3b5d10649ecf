"""Preemption, and progress while there are too few blocks, on the simulated device that checks every KV slot."""
from __future__ import annotations

import pytest

from nanovllm.engine.sequence import Sequence
from tests.engine.harness import Harness
from tests.engine.reference import Picture, is_solo, prompt

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@OVERLAP
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_lose_nothing(prefix_caching: bool, overlap: bool) -> None:
    engine = Harness(num_blocks=12, enable_prefix_caching=prefix_caching, overlap=overlap)
    prompts = [prompt(12, i) for i in range(3)]
    seqs = [engine.add(parts, max_tokens=20) for parts in prompts]
    engine.run()
    assert engine.scheduler.stats.preemptions >= 2
    for seq, parts in zip(seqs, prompts):
        assert is_solo(seq, parts) and seq.num_completion_tokens == 20 and seq.finish_reason == "length"


@OVERLAP
def test_the_oldest_always_advances(overlap: bool) -> None:
    engine = Harness(num_blocks=5, overlap=overlap)
    seqs = [engine.add(prompt(4, i), max_tokens=12) for i in range(4)]
    while not engine.scheduler.is_finished():
        oldest = min((seq for seq in seqs if not seq.is_finished), key=lambda seq: seq.seq_id)
        before = len(oldest)
        engine.step()
        engine.step()
        assert len(oldest) > before
    assert engine.num_steps <= 4 * 12 and engine.scheduler.stats.preemptions <= 12
    assert [seq.num_completion_tokens for seq in seqs] == [12] * 4


def test_a_full_pool_with_steps_in_flight_keeps_all_others_running() -> None:
    """A sequence that must go, but has an id on its way, holds up nobody: about as many steps as one at a time."""
    def run(overlap: bool) -> tuple[int, list[Sequence]]:
        engine = Harness(num_blocks=40, block_size=16, max_num_seqs=16, max_model_len=256, overlap=overlap)
        seqs = [engine.add(prompt(9 + 3 * (i % 4), i), max_tokens=40 + 8 * (i % 7)) for i in range(16)]
        engine.run()
        assert engine.scheduler.stats.preemptions >= 5
        return engine.num_steps, seqs

    in_turn, expected = run(overlap=False)
    overlapped, seqs = run(overlap=True)
    assert [seq.completion_token_ids for seq in seqs] == [seq.completion_token_ids for seq in expected]
    assert overlapped <= 1.1 * in_turn


@OVERLAP
@pytest.mark.parametrize("parts, max_tokens", [(prompt(4), 4), (prompt(3), 5), ([Picture(1, 4)], 4)])
def test_a_pool_of_exactly_the_blocks_needed(parts: list[int | Picture], max_tokens: int, overlap: bool) -> None:
    engine = Harness(num_blocks=2, overlap=overlap)
    seq = engine.generate(parts, max_tokens=max_tokens)
    assert seq.num_completion_tokens == max_tokens and engine.scheduler.stats.preemptions == 0


def test_blocks_held_are_those_that_kv_needs() -> None:
    engine = Harness()
    seq = engine.add(prompt(6), max_tokens=12)
    engine.step()
    while not seq.is_finished:
        assert len(seq.block_table) == -(-seq.num_computed // 4)
        engine.step()
