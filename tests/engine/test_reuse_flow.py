"""Images that come back: what is reused, computed, stored and shared; every KV row is checked by the harness."""
from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import pytest

from nanovllm.engine.sequence import Sequence
from nanovllm.metrics import Usage
from tests.engine.harness import Harness
from tests.engine.reference import Picture, greedy, solo_tokens

CAT, DOG, TOWN = Picture(1, 10), Picture(2, 6), Picture(3, 13)
Parts = SequenceOf[int | Picture]


def engine(ratio: object = 0.3, **options: object) -> Harness:
    return Harness(**{"recompute_ratio": ratio, "enable_prefix_caching": False} | options)


def calls(harness: Harness, picture: Picture) -> int:
    return sum(n for key, n in harness.device.num_encoded.items() if key[2] == picture.pixels)


# ---------------------------------------------------------------- moved images

@pytest.mark.parametrize("before", [0, 1, 3, 7, 40])
@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.5, (0.4, 0.4, 0.4), (1.0, 0.5, 0.0), (0.2, 0.1, 0.1)])
def test_a_moved_image_is_reused(ratio: float | tuple[float, ...], before: int) -> None:
    harness = engine(ratio)
    assert harness.usage([1, 2, 3, CAT, 4]) == Usage(0, 0, 0, 0, 1)
    computed = harness.device.num_computed
    leading = math.ceil((ratio if isinstance(ratio, float) else ratio[0]) * 10)
    assert harness.usage([*[9] * before, CAT, 5, 6]) == Usage(0, 10 - leading, leading, 1, 0)
    assert harness.device.num_computed - computed == before + 2 + leading + 3
    assert calls(harness, CAT) == 1


@pytest.mark.parametrize("ratio", [0.0, 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
def test_ratios_that_reuse_nothing(ratio: object) -> None:
    harness = engine(ratio)
    for parts in ([1, CAT, 4], [1, 2, CAT, 5], [1, 2, CAT, 5]):
        seq = harness.generate(parts)
        assert seq.num_reused_tokens == 0 and seq.completion_token_ids == solo_tokens(parts, greedy(), 4)
    assert harness.manager.image_kv.num_entries == 1        # recorded at every ratio


def test_a_request_has_its_own_ratio() -> None:
    harness = engine(0.0)
    harness.generate([1, CAT, 4])
    assert harness.usage([2, 2, CAT, 4], recompute_ratio=0.5).reused == 5
    assert harness.usage([3, 3, CAT, 4]).reused == 0
    other = engine(0.3)
    other.generate([1, CAT, 4])
    assert other.usage([2, 2, CAT, 4], recompute_ratio=0.0).reused == 0
    assert other.usage([2, 2, CAT, 4], recompute_ratio=[0.5, 0.2, 0.2]).recomputed == 5


def test_an_image_moved_many_times_always_comes_from_the_clean_copy() -> None:
    harness = engine()
    harness.generate([1, CAT, 2])
    entry, = harness.live_entries()
    for i in range(16):
        assert harness.usage([*[3] * i, CAT, 2]).reused == 7       # the harness sees a copy of a copy
        assert harness.live_entries() == [entry]


@pytest.mark.parametrize("order, reused, computed", [
    ([CAT, DOG, TOWN], 7 + 4 + 9, 3 + 2 + 4), ([CAT, Picture(9, 4), TOWN], 7 + 9, 3 + 4 + 4),
    ([Picture(8, 4), Picture(9, 4), TOWN], 9, 4 + 4 + 4), ([TOWN, CAT, DOG], 0, 29)])
def test_hits_and_misses_mixed(order: list[Picture], reused: int, computed: int) -> None:
    harness = engine()
    harness.generate([1, CAT, 2, DOG, 3, TOWN, 4])
    before = harness.device.num_computed
    assert harness.usage([5, 5, order[0], order[1], 5, order[2], 6], max_tokens=1).reused == reused
    assert harness.device.num_computed - before == computed + 4


def test_the_encoder_is_not_called_where_no_row_is_needed() -> None:
    """The block that is hit covers the two leading rows; the others stand in the table."""
    harness = engine(0.2, enable_prefix_caching=True, encoder_blocks=0)
    harness.generate([1, 2, CAT, 3, 4])
    harness.shorten_prefixes(1)
    computed = harness.device.num_computed
    assert harness.usage([1, 2, CAT, 3, 5], max_tokens=1) == Usage(4, 8, 0, 1, 0)
    assert calls(harness, CAT) == 1 and harness.device.num_computed - computed == 2


@pytest.mark.parametrize("ratio, covered, expected", [
    (0.5, 0, Usage(0, 5, 5, 1, 0)), (0.5, 1, Usage(4, 5, 3, 1, 0)), (0.5, 2, Usage(8, 4, 0, 1, 0)),
    (0.5, 3, Usage(12, 0, 0, 0, 0)), ((1.0, 0.5, 0.0), 1, Usage(4, 0, 8, 1, 0)),
    ((0.5, 0.0, 0.0), 2, Usage(8, 4, 0, 1, 0))])
def test_a_hit_that_covers_part_of_an_image(ratio: object, covered: int, expected: Usage) -> None:
    """Blocks hold rows 0 and 1 of the image, then 2 to 5, then 6 to 9."""
    harness = engine(ratio, enable_prefix_caching=True)
    harness.generate([1, 2, CAT, 3, 4])
    harness.shorten_prefixes(covered)
    assert harness.usage([1, 2, CAT, 9]) == expected


def test_an_image_at_the_end_of_the_prompt_gives_up_its_last_row() -> None:
    harness = engine()
    harness.generate([1, CAT, 2])
    before = harness.device.num_computed
    assert harness.usage([3, 3, CAT], max_tokens=1) == Usage(0, 6, 3, 1, 0)
    assert harness.device.num_computed - before == 2 + 3 + 1
    assert harness.usage([CAT], max_tokens=5).reused == 6
    one = Picture(7, 1)
    harness.generate([1, one, 2])
    assert harness.usage([3, one]) == Usage(0, 0, 0, 0, 1)


# ---------------------------------------------------------------- ordinals

def test_only_the_own_ordinal_is_reused_and_others_become_variants() -> None:
    harness = engine()
    harness.generate([1, CAT, 2])
    assert harness.usage([DOG, CAT, 2]) == Usage(0, 0, 0, 0, 2)
    assert sorted(harness.manager.image_kv_cache[harness.live_entries()[0].key]) == [0, 1]
    assert harness.usage([TOWN, 5, CAT, 2]).images_reused == 1
    assert harness.usage([6, CAT, 2]).images_reused == 1


def test_any_ordinal_takes_the_nearest() -> None:
    harness = engine(reuse_any_ordinal=True)
    harness.generate([CAT, 1], recompute_ratio=0.0)
    harness.generate([DOG, TOWN, 2, CAT, 3], recompute_ratio=0.0)
    seq = harness.add([Picture(8, 4), CAT, 4])
    harness.step()
    near = harness.manager.get_image_kv_entry(seq.images[1].kv_key, 0)
    assert near is not None and near.block_table[0] in {copy.source_blocks[0] for copy in seq.reuse.copies}
    harness.run()
    assert seq.usage.images_reused == 1                 # from ordinal 0, as near as ordinal 2
    assert harness.usage([CAT, 4], reuse_any_ordinal=False).images_reused == 1
    assert harness.usage([Picture(7, 4), CAT, 4], reuse_any_ordinal=False).images_reused == 0


def test_the_same_image_twice_in_one_prompt() -> None:
    harness = engine()
    assert harness.usage([1, CAT, 2, CAT, 3]) == Usage(0, 0, 0, 0, 2)
    assert harness.manager.image_kv.num_entries == 2 and calls(harness, CAT) == 1
    assert harness.usage([4, 4, CAT, CAT, 3]) == Usage(0, 14, 6, 2, 0)
    both = engine(reuse_any_ordinal=True)
    both.generate([1, CAT, 2])
    assert both.usage([4, 4, CAT, CAT, 3]) == Usage(0, 14, 6, 2, 0)
    assert both.manager.image_kv.num_entries == 1       # what was reused is no entry


# ---------------------------------------------------------------- which entry stays

def test_an_image_behind_a_reused_one_is_stored_until_an_exact_one_comes() -> None:
    harness = engine()
    harness.generate([1, CAT, 2])
    harness.generate([3, 3, CAT, DOG, 2])               # the dog is computed behind the reused cat
    dog = harness.manager.get_image_kv_entry(("content", None, 2, (1, 2, 12)), 1)
    assert dog is not None and not dog.exact
    assert harness.usage([4, CAT, 4, DOG, 2]).images_reused == 2
    assert harness.manager.get_image_kv_entry(dog.key, 1) is dog
    harness.generate([5, TOWN, DOG, 2], recompute_ratio=0.0)
    better = harness.manager.get_image_kv_entry(dog.key, 1)
    assert better is not dog and better is not None and better.exact
    harness.generate([6, 6, TOWN, DOG], recompute_ratio=0.0)
    assert harness.manager.get_image_kv_entry(dog.key, 1) is better


def test_what_lies_in_approximate_blocks_is_no_entry() -> None:
    """The next turn hits the blocks of the ratio, with the reused image in them, after its entry is gone."""
    harness = engine(enable_prefix_caching=True)
    harness.generate([1, CAT, 2], recompute_ratio=0.0)
    first = harness.generate([3, 3, 3, CAT, 5, 6, 7])
    for entry in harness.live_entries():
        harness.manager.image_kv.drop(entry)
    turn: Parts = [3, 3, 3, CAT, 5, 6, 7, *first.completion_token_ids, 8]
    seq = harness.generate(turn)
    assert seq.num_cached_tokens == 16 and not harness.live_entries()


def test_one_forged_hash_of_two_sizes_never_mixes() -> None:
    harness = engine()
    seqs = []
    for rows in (10, 7, 10):
        seq = harness.add([1, Picture(1, rows), 2])
        seq.images[0].key = seq.images[0].kv_key = ("content", None, 1, "forged")
        seqs.append(seq)
        harness.run()
    assert [seq.usage.reused for seq in seqs] == [0, 0, 7]


def test_a_video_is_reused_at_its_own_speed_only() -> None:
    slow, fast = (Picture(5, 4, interval=interval, frames=2) for interval in (2.0, 1.0))
    for prefix_caching in (False, True):
        harness = engine(enable_prefix_caching=prefix_caching)
        found = [harness.usage([*[1] * i, video, 2]).images_reused for i, video in enumerate((slow, fast, slow, fast))]
        assert found == [0, 0, 1, 1] and calls(harness, slow) == 1


def test_salts_and_names_are_worlds_of_their_own() -> None:
    harness = engine()
    named = Picture(1, 10, is_named=True)
    worlds = [(CAT, None), (CAT, "a"), (named, None), (CAT, "b")]
    for i, (picture, salt) in enumerate(worlds * 2):
        found = harness.usage([*[1] * i, picture, 2], cache_salt=salt).images_reused
        assert found == (i >= len(worlds))


# ---------------------------------------------------------------- one image in a batch

@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [9, 256])
def test_requests_of_one_batch_compute_a_new_image_once(budget: int, overlap: bool) -> None:
    harness = engine(overlap=overlap, max_num_batched_tokens=budget)
    seqs: list[Sequence] = [harness.add([i, *[2] * i, CAT, 3], max_tokens=2) for i in range(4)]
    harness.run()
    assert calls(harness, CAT) == 1 and [seq.usage.reused for seq in seqs] == [0, 7, 7, 7]
    assert harness.device.num_computed == 12 + sum(i + 1 + 3 + 1 for i in (1, 2, 3)) + 4


def test_a_request_waits_only_for_an_image_it_could_then_reuse() -> None:
    harness = engine()
    first = harness.add([1, DOG, CAT, 2])
    same, other = harness.add([3, DOG, CAT, 4]), harness.add([5, CAT, 6])
    off = harness.add([7, DOG, CAT, 8], recompute_ratio=0.0)
    assert harness.step() == [first, other, off]            # the cat of `other` has another ordinal
    assert harness.step() == [first, other, off, same] and same.usage.images_reused == 2
    harness.run()


def test_nobody_waits_for_an_image_that_is_there_already() -> None:
    """A request without reuse computes it again, and one whose entry is gone has computed it already."""
    harness = engine(max_num_batched_tokens=16)
    harness.generate([1, CAT, 2])
    slow = harness.add([*[3] * 10, CAT, 4], recompute_ratio=0.0)
    harness.step()
    quick = harness.add([5, CAT, 6])
    assert harness.step() == [slow, quick] and quick.usage.images_reused == 1
    harness.run()
    done = harness.add([7, CAT, 8], max_tokens=9, recompute_ratio=0.0)
    harness.step()
    for entry in harness.live_entries():
        harness.manager.image_kv.drop(entry)
    late = harness.add([9, CAT, 9])
    assert harness.step() == [done, late]
    harness.run()


def test_nobody_waits_for_an_image_that_is_only_reused() -> None:
    harness = engine(max_num_batched_tokens=16)
    harness.generate([1, CAT, 2])
    reusing = harness.add([*[3] * 15, CAT, 4])
    harness.step()
    for entry in harness.live_entries():
        harness.manager.image_kv.drop(entry)
    other = harness.add([5, CAT, 6])
    assert harness.step() == [reusing, other]
    harness.run()


def test_counters_say_where_tokens_came_from() -> None:
    harness = engine(enable_prefix_caching=True)
    harness.generate([1, 1, 1, 1, CAT, 2], max_tokens=1)                   # 15 computed, one miss
    harness.generate([1, 1, 1, 1, CAT, 3], max_tokens=1)                   # 12 cached, of the image two rows are behind
    harness.generate([4, CAT, DOG, 5], max_tokens=1)                       # 7 reused, one hit and one miss
    stats = harness.scheduler.stats
    assert (stats.requests, stats.cached_tokens, stats.reused_tokens) == (3, 12, 7 + 2)
    assert stats.computed_tokens == 15 + 1 + 11 == harness.device.num_computed
    assert (stats.image_kv_hits, stats.image_kv_misses, stats.preemptions) == (2, 2, 0)
