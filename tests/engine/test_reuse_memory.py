"""Exact first, approximate blocks apart, shared blocks, pins and evictions of image KV."""
from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest

from nanovllm.metrics import Usage
from tests.engine.harness import Harness
from tests.engine.reference import Picture, solo_tokens

CAT, DOG = Picture(1, 10), Picture(2, 6)
Parts = SequenceOf[int | Picture]


def usage(harness: Harness, parts: Parts, **options: object) -> Usage:
    seq = harness.generate(parts, **options)
    assert seq.usage is not None
    if seq.sampling_params.recompute_ratio in (0.0, 1.0):
        assert seq.completion_token_ids == solo_tokens(parts, seq.sampling_params, seq.num_completion_tokens)
    return seq.usage


# ---------------------------------------------------------------- namespaces

def test_exact_requests_never_see_what_was_computed_on_reused_rows() -> None:
    harness = Harness(recompute_ratio=0.02)
    harness.generate([1, CAT, 2])
    parts: Parts = [3, 3, 3, 3, 3, CAT, 4, 4, 4, 4, 4]
    assert usage(harness, parts).reused == 9
    assert usage(harness, parts, recompute_ratio=1.0) == Usage(4, 0, 0, 0, 1)      # the text before the image is exact
    assert usage(harness, parts, recompute_ratio=0.0).cached == 16
    assert usage(harness, parts) == Usage(16, 0, 0, 0, 0)                          # exact first


def test_the_next_turn_hits_the_blocks_of_its_own_ratio_and_nobody_elses() -> None:
    harness = Harness(recompute_ratio=0.3)
    harness.generate([1, CAT, 2])
    first = harness.generate([3, 3, 3, 3, 3, CAT, 4, 4, 4], max_tokens=6)
    turn: Parts = [3, 3, 3, 3, 3, CAT, 4, 4, 4, *first.completion_token_ids, 5, 6]
    for other in (dict(recompute_ratio=0.5), dict(recompute_ratio=[0.3, 0.3, 0.1]), dict(reuse_any_ordinal=True)):
        assert usage(harness, turn, max_tokens=1, **other).cached == 8      # the block of leading rows is exact
    assert usage(harness, turn, recompute_ratio=[0.3, 0.3, 0.3]) == Usage(20, 0, 0, 0, 0)
    assert usage(harness, turn) == Usage(24, 0, 0, 0, 0)


def test_a_list_has_a_namespace_of_its_own() -> None:
    harness = Harness(recompute_ratio=[0.5, 0.5, 0.0])
    harness.generate([1, CAT, 2])
    parts: Parts = [3, CAT, 4, 4, 4, 4, 4]
    assert usage(harness, parts) == Usage(0, 5, 5, 1, 0)
    assert usage(harness, parts) == Usage(12, 0, 0, 0, 0)
    assert usage(harness, parts, recompute_ratio=0.5) == Usage(0, 5, 5, 1, 0)


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
    assert usage(harness, [5, 6, big, 7, 7, 8]) == Usage(24, 0, 0, 0, 0)
    assert usage(harness, [1, 2, big, 3, 3, 8], recompute_ratio=0.0) == Usage(24, 0, 0, 0, 0)


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
    assert usage(harness, [4, 4, CAT, *range(20, 32)], max_tokens=1).reused == 7
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
    assert usage(harness, [3, 3, CAT, 2, 2, 2], max_tokens=2, recompute_ratio=0.3).reused == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [3, 8])
def test_reuse_in_chunks_counts_only_computed_rows(budget: int, overlap: bool) -> None:
    harness = Harness(recompute_ratio=0.2, enable_prefix_caching=False, max_num_batched_tokens=budget, overlap=overlap)
    harness.generate([1, CAT, 2, DOG, 3])
    before, computed = harness.num_steps, harness.device.num_computed
    assert usage(harness, [4, 4, CAT, 5, DOG, 6], max_tokens=1) == Usage(0, 12, 4, 2, 0)
    assert harness.device.num_computed - computed == 8 and harness.num_steps - before == -(-8 // budget)


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_requests_reuse_again(overlap: bool) -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=14, overlap=overlap)
    harness.generate([1, CAT, 2])
    seqs = [harness.add([*[3] * i, CAT, 4], max_tokens=18) for i in range(3)]
    harness.run()
    assert harness.scheduler.stats.preemptions > 0 and [seq.num_completion_tokens for seq in seqs] == [18] * 3


def test_a_resumed_sequence_may_have_no_prompt_token_to_compute() -> None:
    """Its first block is a hit, the rest of the image is reused: such a step is no prefill, as the harness checks."""
    harness = Harness(recompute_ratio=0.2)
    harness.generate([1, CAT, 2])
    seq = harness.add([3, 3, CAT], max_tokens=9)
    for _ in range(3):
        harness.step()
    harness.scheduler._preempt(seq)
    for node in list(harness.manager.prefixes):
        if node.block is not None and node.parent is not harness.manager.prefixes.root:
            harness.manager.prefixes.forget_block(node.block)
    harness.step()
    assert seq.num_cached_tokens == 4 and seq.num_reused_tokens == 8 and seq.num_completion_tokens == 4
    harness.run()


# ---------------------------------------------------------------- names without pixels

NAMED = Picture(1, 10, is_named=True)
NAME_ONLY = replace(NAMED, has_pixels=False)


def test_a_name_alone_serves_while_what_it_needs_is_cached() -> None:
    harness = Harness(recompute_ratio=0.3)
    with pytest.raises(ValueError, match=r"image 0 .*image_hashes: 1.*pass its pixel_values"):
        harness.add([1, NAME_ONLY, 2])
    harness.generate([1, NAMED, 2])
    assert usage(harness, [3, 3, NAME_ONLY, 2]).reused == 7
    assert usage(harness, [4, NAME_ONLY, 2], recompute_ratio=0.0).reused == 0       # from its encoder rows
    harness.encoder_cache.clear()
    with pytest.raises(ValueError, match="pass its pixel_values"):
        harness.add([5, 5, NAME_ONLY, 2])
    assert usage(harness, [1, NAME_ONLY, 2, 2, 2]) == Usage(12, 0, 0, 0, 0)


def test_a_waiting_name_keeps_what_it_needs_and_the_youngest_gives_way() -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=12, max_num_seqs=1)
    harness.generate([1, NAMED, 2], max_tokens=1)
    harness.add(list(range(20)), max_tokens=29)              # needs all 12 blocks in the end
    seqs = [harness.add([3, 3, NAME_ONLY, 2]) for _ in range(2)]
    assert all(seq.held_blocks for seq in seqs)
    harness.run()
    assert [seq.finish_reason for seq in seqs] == ["error", "error"]
    assert "[1]" in str(seqs[0].error) and "pixel_values" in str(seqs[0].error)
    assert harness.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("num_blocks, first_tokens, text, ends", [
    (10, 9, 5, "error"), (12, 16, 1, "error"), (14, 17, 5, "error"), (16, 12, 1, "length"), (17, 20, 5, "length")])
def test_a_preempted_name_never_evicts_what_it_needs_itself(
        num_blocks: int, first_tokens: int, text: int, ends: str) -> None:
    """It comes back when its entry's blocks are the only ones left to evict, and its encoder rows are gone."""
    harness = Harness(recompute_ratio=0.2, num_blocks=num_blocks, encoder_blocks=3, max_model_len=64)
    others = [harness.add(list(range(text)), max_tokens=30), harness.add([1, NAMED, 2], max_tokens=first_tokens)]
    harness.step()
    seq = harness.add([8, 8, NAME_ONLY, 2], max_tokens=12)
    while not seq.num_completion_tokens:
        harness.step()
    harness.encoder_cache.clear()
    harness.run()                   # the device has no pixels to encode
    assert seq.finish_reason == ends and (ends == "length" or "[1]" in str(seq.error) or ": 1" in str(seq.error))
    assert harness.scheduler.stats.preemptions > 0 or ends == "length"
    assert [other.finish_reason for other in others] == ["length", "length"]


def test_a_name_whose_rows_are_there_needs_no_entry() -> None:
    """The pool cannot hold the entry beside the request; the image is computed from its encoder rows."""
    harness = Harness(recompute_ratio=0.3, num_blocks=5, enable_prefix_caching=False)
    harness.generate([1, NAMED, 2], max_tokens=1)
    seq = harness.generate([3, 3, 3, NAME_ONLY, 2], max_tokens=4)
    assert seq.finish_reason == "length" and seq.usage == Usage(0, 0, 0, 0, 1)


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
