"""Variants by ordinal, which of two entries stays, and entries that never outlive their blocks."""
from __future__ import annotations

import pytest

from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.image_kv_table import ImageKVEntry, ImageKVTable, block_range, held_table

BLOCKS_OF_AN_ENTRY = 2


class Table(ImageKVTable):
    """A table whose entries lie in blocks that nobody reads any more."""

    def add(self, key: str, ordinal: int, exact: bool = True) -> ImageKVEntry:
        blocks = [self.pool.pop_free() for _ in range(BLOCKS_OF_AN_ENTRY)]
        entry = ImageKVEntry([-1, *blocks], 4, 12, key=key, ordinal=ordinal, exact=exact)
        self.put(entry)
        for block_id in blocks:
            self.pool.release(block_id)
        self.check()
        return entry

    def check(self) -> None:
        self.check_integrity()
        self.pool.check_integrity()
        assert len(self.pool.lru) == BLOCKS_OF_AN_ENTRY * self.num_entries
        assert all(variants for variants in self.images.values())


def table(max_variants: int = 4, num_blocks: int = 32) -> Table:
    return Table(BlockPool(num_blocks), max_variants)


def test_an_entry_is_found_by_image_and_ordinal() -> None:
    kv = table()
    first, second = kv.add("cat", 0), kv.add("cat", 2)
    other = kv.add("dog", 0)
    assert kv.get("cat", 0) is first and kv.get("cat", 2) is second and kv.get("dog", 0) is other
    assert kv.get("cat", 1) is None and kv.get("town", 0) is None and kv.get("town") is None
    assert kv.num_entries == 3 and set(kv.images) == {"cat", "dog"}


def test_without_an_ordinal_the_newest() -> None:
    kv = table()
    first, second = kv.add("cat", 3), kv.add("cat", 0)
    assert kv.get("cat") is second
    kv.touch(first)
    assert kv.get("cat") is first


@pytest.mark.parametrize("ordinal, found", [(0, 1), (1, 1), (2, 1), (3, 1), (4, 5), (9, 5)])
def test_the_nearest_ordinal_and_of_two_the_lower(ordinal: int, found: int) -> None:
    kv = table()
    entries = {ordinal: kv.add("cat", ordinal) for ordinal in (5, 1)}
    assert kv.get("cat", ordinal, nearest=True) is entries[found]


@pytest.mark.parametrize("old, new, replaced", [
    (True, True, False), (True, False, False), (False, False, False), (False, True, True)])
def test_only_an_exact_entry_replaces_and_only_an_inexact_one(old: bool, new: bool, replaced: bool) -> None:
    kv = table()
    before, after = kv.add("cat", 0, exact=old), kv.add("cat", 0, exact=new)
    assert kv.get("cat", 0) is (after if replaced else before)
    assert kv.num_entries == 1 and len(kv.pool.free) == 30


def test_the_longest_unused_variant_gives_way() -> None:
    kv = table(max_variants=2)
    for ordinal in (0, 1):
        kv.add("cat", ordinal)
    kv.add("cat", 0)                    # is there already, and so becomes the newest
    kv.add("cat", 2)
    assert sorted(kv.images["cat"]) == [0, 2]
    kv.add("dog", 7)                    # another image has variants of its own
    assert sorted(kv.images["cat"]) == [0, 2] and kv.num_entries == 3


def test_one_variant_at_most() -> None:
    kv = table(max_variants=1)
    for ordinal in (0, 1, 1, 0):
        kv.add("cat", ordinal)
        assert list(kv.images["cat"]) == [ordinal]


def test_an_entry_goes_with_any_of_its_blocks_and_the_others_become_free() -> None:
    kv = table()
    for lost in (1, 2):
        entry = kv.add("cat", 0)
        kv.forget_block(kv.pool.blocks[entry.block_table[lost]])
        kv.check()
        assert not kv.images and len(kv.pool.free) == 32
    assert kv.num_evicted == 2


def test_blocks_that_are_read_stay_when_their_entry_goes() -> None:
    kv = table()
    entry = kv.add("cat", 0)
    kv.pool.acquire(entry.block_table[1])
    kv.drop(entry)
    kv.check()
    kv.pool.release(entry.block_table[1])
    kv.check()
    assert len(kv.pool.free) == 32


def test_a_hit_is_the_last_to_be_evicted() -> None:
    kv = table()
    first, _ = kv.add("cat", 0), kv.add("dog", 0)
    assert kv.pool.oldest_cached() in first.held_blocks
    kv.touch(first)
    assert kv.pool.oldest_cached() not in first.held_blocks


def test_two_images_in_one_block() -> None:
    kv = table()
    block = kv.pool.pop_free()
    for start, key in ((0, "cat"), (2, "dog")):
        kv.put(ImageKVEntry([block], start, start + 2, key=key))
    kv.pool.release(block)
    kv.check_integrity()
    kv.drop(kv.images["cat"][0])
    assert list(kv.pool.lru) == [block]
    kv.forget_block(kv.pool.blocks[block])
    assert not kv.images and len(kv.pool.free) == 32


@pytest.mark.parametrize("start, stop, blocks", [
    (0, 1, [0]), (3, 4, [0]), (0, 4, [0]), (3, 5, [0, 1]), (4, 8, [1]), (5, 13, [1, 2, 3])])
def test_blocks_of_a_range(start: int, stop: int, blocks: list[int]) -> None:
    assert list(block_range(start, stop, 4)) == blocks
    held = held_table([10, 11, 12, 13, 14], start, stop, 4)
    assert held == [10 + i if i in blocks else -1 for i in range(blocks[-1] + 1)]


def test_an_entry_that_its_blocks_do_not_know_is_seen() -> None:
    kv = table()
    entry = kv.add("cat", 0)
    kv.pool.blocks[entry.block_table[1]].entries.clear()
    with pytest.raises(AssertionError):
        kv.check_integrity()


def test_a_block_that_names_an_entry_that_is_gone_is_seen() -> None:
    kv = table()
    kv.add("cat", 0)
    kv.images.clear()
    with pytest.raises(AssertionError, match="gone"):
        kv.check_integrity()
