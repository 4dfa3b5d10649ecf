"""Blocks and the prefix cache: what is shared is equal, what is not equal is never shared, and nothing leaks."""
from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from tests.engine.harness import Harness
from tests.engine.reference import Picture, greedy, make_sequence, solo_tokens

RED, BLUE, SMALL = Picture(1, 8), Picture(2, 8), Picture(1, 6)
Parts = SequenceOf[int | Picture]


def hits(engine: Harness, parts: Parts, **options: object) -> int:
    """Cached tokens of a request whose tokens are then found right."""
    seq = engine.generate(parts, **options)
    assert seq.completion_token_ids == solo_tokens(parts, greedy(), 4)
    assert seq.usage is not None and seq.usage.cached == seq.num_cached_tokens
    return seq.num_cached_tokens


# ---------------------------------------------------------------- full and part-filled blocks

def test_a_prompt_whose_every_block_is_cached_leaves_its_last_block_to_compute() -> None:
    engine = Harness()
    parts = list(range(16))
    assert [hits(engine, parts) for _ in range(2)] == [0, 12]
    twice = [engine.add(parts) for _ in range(2)]
    engine.step()
    late = engine.add(parts)                # while the first ones still decode
    engine.run()
    for seq in (*twice, late):
        assert seq.num_cached_tokens == 12 and seq.completion_token_ids == solo_tokens(parts, greedy(), 4)


@pytest.mark.parametrize("first, second", [(range(1, 7), range(1, 8)), (range(1, 8), range(1, 7))])
def test_a_part_filled_block_is_not_shared(first: range, second: range) -> None:
    engine = Harness()
    one = engine.add(list(first), max_tokens=6)
    engine.step()
    two = engine.add(list(second), max_tokens=6)
    engine.step()
    assert two.num_cached_tokens == 4 and len(set(one.block_table) & set(two.block_table)) == 1
    engine.run()
    assert one.completion_token_ids == solo_tokens(list(first), greedy(), 6)
    assert two.completion_token_ids == solo_tokens(list(second), greedy(), 6)


def test_the_index_never_outgrows_the_pool_and_forgets_what_is_overwritten() -> None:
    engine = Harness(num_blocks=3)
    prompts = [[i % 40, i // 40, 3, 4, 5, 6, 7, 8] for i in range(200)]
    for parts in prompts:
        assert hits(engine, parts) == 0
        assert engine.manager.prefixes.num_nodes <= 3
    assert hits(engine, prompts[0]) == 0


def test_generated_tokens_are_cached_as_well() -> None:
    engine = Harness()
    seq = engine.generate([1, 2, 3], max_tokens=10)
    turn = [*seq.token_ids, 30, 31]
    assert hits(engine, turn) == 12          # 3 + 10 tokens, the last one without KV


def test_off_means_off() -> None:
    engine = Harness(enable_prefix_caching=False)
    assert [hits(engine, list(range(16))) for _ in range(2)] == [0, 0] and not engine.manager.prefixes.num_nodes


def test_reset_forgets_everything_and_running_requests_go_on() -> None:
    engine = Harness()
    hits(engine, list(range(16)))
    seq = engine.add(list(range(20, 36)), max_tokens=9)
    engine.step()
    engine.manager.reset()
    engine.check()
    assert not engine.manager.prefixes.num_nodes
    engine.run()
    assert seq.completion_token_ids == solo_tokens(list(range(20, 36)), greedy(), 9)
    assert hits(engine, list(range(16))) == 0
    assert hits(engine, seq.token_ids) == 24        # its blocks were keyed again as it went on


# ---------------------------------------------------------------- eviction

def test_the_longest_unused_goes_first_and_the_tail_before_the_head() -> None:
    engine = Harness(num_blocks=9)
    old, new = list(range(12)), list(range(20, 32))
    for parts in (old, new, [*old[:8], 39]):        # the old one's first two blocks become the newest
        engine.generate(parts, max_tokens=1)
    engine.generate([38] * 15, max_tokens=1)        # takes four blocks; three are free
    assert hits(engine, [*old[:8], 1]) == 8
    assert hits(engine, [*new[:8], 1]) == 8 and hits(engine, [*new, 1]) == 8


def test_of_one_prefix_the_tail_goes_first() -> None:
    engine = Harness(num_blocks=6)
    engine.generate(list(range(12)), max_tokens=1)
    engine.generate([38] * 14, max_tokens=1)        # takes three free blocks and one more
    assert hits(engine, [*range(8), 39]) == 8


def test_keys_behind_an_evicted_block_are_gone_and_running_sequences_publish_again() -> None:
    """The second request's key stands behind a block of the first one, which is evicted while it runs."""
    engine = Harness(num_blocks=8)
    first = engine.add(list(range(4)), max_tokens=5)
    second = engine.add(list(range(4)), max_tokens=14)
    for _ in range(5):
        engine.step()
    assert first.is_finished and second.num_published == 2
    engine.manager.forget([next(iter(engine.manager.prefixes)).block.block_id])
    engine.check()
    engine.run()
    assert hits(engine, [*second.token_ids, 1]) == 16


def test_a_block_that_someone_reads_is_never_taken() -> None:
    engine = Harness(num_blocks=4)
    reader = engine.add(list(range(9)), max_tokens=4)
    engine.step()
    waiting = engine.add(list(range(20, 26)))
    engine.step()
    assert waiting in engine.scheduler.waiting and not set(reader.block_table) & set(engine.manager.pool.free)
    engine.run()


# ---------------------------------------------------------------- what makes blocks equal

def test_the_same_ids_with_another_image_share_only_the_text_before() -> None:
    engine = Harness()
    text = list(range(6))
    assert hits(engine, [*text, RED, 1, 2, 3]) == 0
    assert hits(engine, [*text, BLUE, 1, 2, 3]) == 4
    assert hits(engine, [*text, RED, 1, 2, 3]) == 16
    assert hits(engine, [*text, RED, 9, 9, 9]) == 12
    both = [engine.add([*text, picture, 1, 2, 3]) for picture in (RED, BLUE)]
    engine.run()
    assert [seq.num_cached_tokens for seq in both] == [16, 16]


def test_images_in_one_batch_and_in_another_order() -> None:
    engine = Harness()
    both = [engine.add([1, picture, 2, 3]) for picture in (RED, BLUE)]
    engine.run()
    assert all(seq.completion_token_ids == solo_tokens([1, picture, 2, 3], greedy(), 4)
               for seq, picture in zip(both, (RED, BLUE)))
    assert hits(engine, [RED, BLUE, 1]) == 0 and hits(engine, [BLUE, RED, 1]) == 0
    assert hits(engine, [RED, BLUE, 1]) == 16


def test_an_image_of_another_size_or_at_another_offset_is_no_hit() -> None:
    engine = Harness()
    hits(engine, [1, 2, 3, 4, RED, 5, 5, 5])
    assert hits(engine, [1, 2, 3, 4, SMALL, 5, 5, 5, 5, 5]) == 4
    hits(engine, [RED, 5])
    assert hits(engine, [1, RED, 5]) == 0
    assert hits(engine, [RED, RED, RED]) == 8        # the second one's rows have the same ids, image and offset 0


def test_offsets_tell_images_of_one_forged_hash_apart() -> None:
    engine = Harness()
    for sizes in ((1, 3), (3, 1), (1, 3)):
        seq = engine.add([*(Picture(7, rows) for rows in sizes), 1, 2])
        for image in seq.images:
            image.kv_key = "forged"
        engine.run()
        assert seq.completion_token_ids == solo_tokens([*(Picture(7, rows) for rows in sizes), 1, 2], greedy(), 4)
    assert seq.num_cached_tokens == 4


def test_the_same_video_at_another_speed_is_no_hit_but_is_encoded_once() -> None:
    engine = Harness()
    slow, fast = (Picture(5, 4, interval=interval, frames=2) for interval in (2.0, 1.0))
    assert [hits(engine, [1, 2, 3, 4, video, 5]) for video in (slow, fast, slow, fast)] == [0, 4, 12, 12]
    assert sum(engine.device.num_encoded.values()) == 1


def test_salts_and_names_are_worlds_of_their_own() -> None:
    engine = Harness()
    text = list(range(9))
    assert [hits(engine, text, cache_salt=salt) for salt in ("a", "b", None, "a")] == [0, 0, 0, 8]
    named = Picture(1, 8, is_named=True)
    assert [hits(engine, [picture, 1]) for picture in (RED, named, RED, named)] == [0, 0, 8, 8]


class SameHash(tuple):      # type: ignore[type-arg]
    def __hash__(self) -> int:
        return 1


def test_a_constant_block_hash_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    key = BlockManager._key
    monkeypatch.setattr(BlockManager, "_key", lambda *args: SameHash(key(*args)))
    engine = Harness(recompute_ratio=0.3)
    pairs: list[Parts] = [[1, 50 % 40, 20, 4, 5], [1, 41 % 40, 19, 4, 5], [RED, 1], [BLUE, 1], [2, RED, 1]]
    for _ in range(2):
        for parts in pairs:
            hits(engine, parts, recompute_ratio=0.0)
    assert hits(engine, pairs[0]) == 4


def test_images_without_a_place_neither_hit_nor_publish() -> None:
    """The caller named an image and has not yet looked where it stands."""
    manager = BlockManager(num_blocks=16, block_size=4)
    tables = []
    for image in (111, 111, 222):
        seq = Sequence([1, 1, 1] + [9] * 6 + [2] * 4, SamplingParams(), None, [image])
        assert manager.can_allocate(seq)
        manager.allocate(seq)
        seq.num_computed = len(seq)
        manager.publish(seq)
        tables.append(set(seq.block_table))
    assert not tables[0] & tables[1] and not tables[0] & tables[2] and manager.prefixes.num_nodes == 0


# ---------------------------------------------------------------- the checks themselves

def test_a_leaked_reference_is_seen() -> None:
    engine = Harness()
    engine.add(list(range(9)))
    engine.step()
    engine.manager.pool.acquire(engine.scheduler.running[0].block_table[0])
    with pytest.raises(AssertionError, match="leaked"):
        engine.scheduler.check_integrity()


def test_a_block_in_two_places_is_seen() -> None:
    manager = BlockManager(4, 4)
    seq = make_sequence([1, 2, 3], greedy())
    manager.allocate(seq)
    manager.check_integrity([seq])
    manager.pool.free.append(seq.block_table[0])
    with pytest.raises(AssertionError, match="read, cached, free"):
        manager.check_integrity([seq])
