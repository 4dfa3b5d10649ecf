"""Exact first, approximate blocks apart, shared blocks, pins and evictions of image KV."""
from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest

from nanovllm.metrics import Usage
from tests.engine.harness import Harness
from tests.engine.reference import Picture

CAT, DOG = Picture(1, 10), Picture(2, 6)
Parts = SequenceOf[int | Picture]


# ---------------------------------------------------------------- namespaces

def test_exact_requests_never_see_what_was_computed_on_reused_rows() -> None:
    harness = Harness(recompute_ratio=0.02)
    harness.generate([1, CAT, 2])
    parts: Parts = [3, 3, 3, 3, 3, CAT, 4, 4, 4, 4, 4]
    assert harness.usage(parts).reused == 9
    assert harness.usage(parts, recompute_ratio=1.0) == Usage(4, 0, 0, 0, 0)      # the text before the image is exact
    assert harness.usage(parts, recompute_ratio=0.0).cached == 16
    assert harness.usage(parts) == Usage(16, 0, 0, 0, 0)                          # exact first


def test_the_next_turn_hits_the_blocks_of_its_own_ratio_and_nobody_elses() -> None:
    harness = Harness(recompute_ratio=0.3)
    harness.generate([1, CAT, 2])
    first = harness.generate([3, 3, 3, 3, 3, CAT, 4, 4, 4], max_tokens=6)
    turn: Parts = [3, 3, 3, 3, 3, CAT, 4, 4, 4, *first.completion_token_ids, 5, 6]
    for other in (dict(recompute_ratio=0.5), dict(recompute_ratio=[0.3, 0.3, 0.1]), dict(reuse_any_ordinal=True)):
        assert harness.usage(turn, max_tokens=1, **other).cached == 8      # the block of leading rows is exact
    assert harness.usage(turn, recompute_ratio=[0.3, 0.3, 0.3]) == Usage(20, 0, 0, 0, 0)
    assert harness.usage(turn) == Usage(24, 0, 0, 0, 0)


def test_a_list_has_a_namespace_of_its_own() -> None:
    harness = Harness(recompute_ratio=[0.5, 0.5, 0.0])
    harness.generate([1, CAT, 2])
    parts: Parts = [3, CAT, 4, 4, 4, 4, 4]
    assert harness.usage(parts) == Usage(0, 5, 5, 1, 0)
    assert harness.usage(parts) == Usage(12, 0, 0, 0, 0)
    assert harness.usage(parts, recompute_ratio=0.5) == Usage(0, 5, 5, 1, 0)


# ---------------------------------------------------------------- shared blocks

def test_blocks_that_line_up_are_shared_and_carry_one_key_for_each_namespace() -> None:
    harness = Harness(recompute_ratio=0.1, enable_prefix_caching=True)
    big = Picture(1, 20)
    harness.generate([1, 2, big, 3, 3, 3])
    entry, = harness.live_entries()
    seq = harness.add([5, 6, big, 7, 7, 7], max_tokens=3)
    harness.step()
    # row 0 and 1 of the image are computed; of [4, 22), blocks 1 to 4 are shared and rows 20 and 21 copied
    assert seq.block_table[1:5] == entry.block_table[1:5] and seq.block_table[0] != entry.block_table[0]
    assert harness.device.num_copied == 2
    assert [len(harness.manager.pool.blocks[i].nodes) for i in seq.block_table] == [1, 2, 2, 2, 2, 1, 0]
    harness.run()
    assert harness.usage([5, 6, big, 7, 7, 8]) == Usage(24, 0, 0, 0, 0)
    assert harness.usage([1, 2, big, 3, 3, 8], recompute_ratio=0.0) == Usage(24, 0, 0, 0, 0)


def test_a_per_layer_list_copies_into_its_own_blocks_what_some_layer_computes() -> None:
    harness = Harness(recompute_ratio=[1.0, 0.1, 0.1])
    big = Picture(1, 20)
    harness.generate([1, 2, big, 3])
    entry, = harness.live_entries()
    seq = harness.add([5, 6, big, 7])
    harness.step()
    assert not set(seq.block_table) & set(entry.held_blocks)
    harness.run()


def test_readers_of_shared_blocks_come_and_go_in_any_order() -> None:
    harness = Harness(recompute_ratio=0.1, num_blocks=24)
    big = Picture(1, 20)
    source = harness.add([1, 2, big, 3], max_tokens=12)
    harness.step()
    first = harness.add([5, 6, big, 7], max_tokens=2)
    second = harness.add([8, 9, big, 7], max_tokens=9)
    harness.step()
    shared = set(source.block_table) & set(first.block_table) & set(second.block_table)
    assert len(shared) == 4
    harness.scheduler.abort(source.seq_id)
    harness.check()
    harness.run()
    assert first.num_completion_tokens == 2 and second.num_completion_tokens == 9


# ---------------------------------------------------------------- pins and evictions

def test_sources_are_pinned_until_they_are_copied() -> None:
    harness = Harness(recompute_ratio=0.3, enable_prefix_caching=False)
    harness.generate([1, CAT, 2])
    entry, = harness.live_entries()
    blocks = [harness.manager.pool.blocks[i] for i in entry.held_blocks]
    seq = harness.add([1, 2, 3, CAT, 2])
    harness.scheduler.schedule()
    assert [block.readers for block in blocks] == [1] * len(blocks)
    harness.scheduler.abandon_steps()
    harness.step()
    assert [block.readers for block in blocks] == [0] * len(blocks) and not seq.is_finished
    harness.run()


def test_an_aborted_reader_unpins() -> None:
    harness = Harness(recompute_ratio=0.3, enable_prefix_caching=False, max_num_batched_tokens=4)
    harness.generate([1, CAT, 2])
    seq = harness.add([1, 2, 3, CAT, 2, 3, 4, 5, 6])
    harness.scheduler.schedule()
    harness.scheduler.abandon_steps()
    assert seq.reuse is not None and seq.reuse.pinned
    harness.scheduler.abort(seq.seq_id)
    harness.check_all_returned()


def test_what_a_request_will_reuse_is_the_last_that_it_evicts() -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=9)
    harness.generate([1, CAT, 2])                           # the oldest
    harness.generate([3, DOG, *range(8, 20)])
    assert harness.usage([4, 4, CAT, *range(20, 32)], max_tokens=1).reused == 7
    assert len(harness.live_entries()) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_are_never_refused_for_cached_entries(overlap: bool) -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=8, overlap=overlap)
    for i in range(6):
        harness.generate([Picture(i, 7), 1], max_tokens=1)
    assert len(harness.live_entries()) >= 2
    seq = harness.generate([*range(20)], max_tokens=13)
    assert seq.num_completion_tokens == 13 and harness.scheduler.stats.preemptions == 0
    assert not harness.live_entries() and harness.manager.image_kv.num_evicted >= 3


def test_a_pool_too_small_for_source_and_target_computes_in_full() -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=5)
    harness.generate([1, CAT, 2], max_tokens=2)
    assert harness.usage([3, 3, CAT, 2, 2, 2], max_tokens=2, recompute_ratio=0.3).reused == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 8])
def test_reuse_in_chunks_counts_only_computed_rows(budget: int, overlap: bool) -> None:
    harness = Harness(recompute_ratio=0.2, enable_prefix_caching=False, max_num_batched_tokens=budget, overlap=overlap)
    harness.generate([1, CAT, 2, DOG, 3])
    before, computed = harness.num_steps, harness.device.num_computed
    assert harness.usage([4, 4, CAT, 5, DOG, 6], max_tokens=1) == Usage(0, 12, 4, 2, 0)
    assert harness.device.num_computed - computed == 8 and harness.num_steps - before == -(-8 // budget)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_reuse_again(overlap: bool) -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=14, overlap=overlap)
    harness.generate([1, CAT, 2])
    seqs = [harness.add([*[3] * i, CAT, 4], max_tokens=18) for i in range(3)]
    harness.run()
    assert harness.scheduler.stats.preemptions > 0 and [seq.num_completion_tokens for seq in seqs] == [18] * 3


def test_a_preempted_request_does_not_overtake_an_older_one_that_waits() -> None:
    harness = Harness(recompute_ratio=0.3, max_num_batched_tokens=16)
    first = harness.add([*range(20), CAT, 1])
    harness.step()
    second, third = harness.add([2, CAT, 2]), harness.add([3, 4])
    assert harness.step() == [first, third]                 # the second one waits for the image of the first
    harness.scheduler.requeue(third)
    assert list(harness.scheduler.waiting) == [second, third]
    harness.run()


def test_a_resumed_sequence_may_have_no_prompt_token_to_compute() -> None:
    """Its first block is a hit, the rest of the image is reused: such a step is no prefill, as the harness checks."""
    harness = Harness(recompute_ratio=0.2)
    harness.generate([1, CAT, 2])
    seq = harness.add([3, 3, CAT], max_tokens=9)
    for _ in range(3):
        harness.step()
    harness.scheduler.requeue(seq)
    harness.shorten_prefixes(1)
    harness.step()
    assert seq.num_cached_tokens == 4 and seq.num_reused_tokens == 8 and seq.num_completion_tokens == 4
    harness.run()


# ---------------------------------------------------------------- many

@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_over_more_images_than_the_pool_holds(overlap: bool) -> None:
    """500 requests over 40 images, a third aborted, in a pool for 6 images."""
    rng = random.Random(0)
    harness = Harness(recompute_ratio=0.3, num_blocks=21, encoder_blocks=12, overlap=overlap,
                      max_num_batched_tokens=24, max_num_seqs=4)
    pictures = [Picture(i, 10) for i in range(40)]
    live = []
    for i in range(500):
        chosen = rng.choices(pictures[:4] if rng.random() < 0.5 else pictures, k=rng.choice([1, 1, 2]))
        parts: list[int | Picture] = [i % 40] * rng.randrange(5)
        for picture in chosen:
            parts += [picture, rng.randrange(40)]
        live.append(harness.add(parts, max_tokens=rng.randrange(1, 5), recompute_ratio=rng.choice([None, None, 0.0])))
        for _ in range(rng.randrange(5)):
            harness.step()
        if i % 3 == 0:
            harness.scheduler.abort(max(live, key=lambda seq: (not seq.is_finished, seq.seq_id)).seq_id)
    harness.run()
    reasons = [seq.finish_reason for seq in live]
    assert set(reasons) == {"length", "abort"} and reasons.count("abort") > 50
    assert harness.scheduler.stats.image_kv_hits > 50 and harness.manager.image_kv.num_evicted > 50
    harness.manager.reset()
    assert len(harness.manager.pool.free) == 21 and not harness.manager.image_kv_cache
