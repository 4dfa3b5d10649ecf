"""The encoder cache: LRU order, pins, rows that are not written yet, and blocks that are never lost."""
from __future__ import annotations

import random

import pytest
import torch

from nanovllm.engine.encoder_cache_manager import EncoderCacheManager
from nanovllm.engine.encoder_cache_table import EncoderCacheTable


def filled(num_blocks: int, **num_rows: int) -> EncoderCacheTable:
    """A table with blocks of 4 rows and these images, written, the first one the oldest."""
    table = EncoderCacheTable(num_blocks, 4)
    for key, rows in num_rows.items():
        table.allocate(key, rows)
        table.mark_written(key)
    return table


def held(table: EncoderCacheTable) -> str:
    table.check_integrity()
    return "".join(str(key) for key in table.entries)


def test_the_oldest_goes_first_and_a_hit_makes_it_the_newest():
    table = filled(4, a=8, b=4, c=1)
    assert table.get_block_ids("a") is not None
    table.allocate("d", 4)
    assert held(table) == "cad"
    table.mark_written("d")
    table.allocate("e", 9)              # three blocks: c's and a's
    assert held(table) == "de"
    assert (table.num_hits, table.num_misses) == (1, 0)


def test_unwritten_rows_are_a_miss_and_stay():
    table = EncoderCacheTable(3, 4)
    ids = table.allocate("a", 8)
    assert table.get_block_ids("a") is None and table.get_block_ids("b") is None
    assert table.can_allocate(4) and not table.can_allocate(5)
    assert table.allocate("a", 8) == ids, "asked for again, it keeps its blocks"
    table.mark_written("a")
    assert table.get_block_ids("a") == ids
    assert table.can_allocate(12)
    assert (table.num_hits, table.num_misses) == (1, 2)
    table.allocate("a", 8)              # its rows are to be encoded again
    assert table.get_block_ids("a") is None


def test_another_size_under_the_same_key_replaces_it():
    table = filled(4, a=8, b=4)
    assert len(table.allocate("a", 12)) == 3
    assert held(table) == "ba"


def test_pinned_rows_are_never_evicted():
    table = filled(3, a=4, b=4, c=4)
    for key in "aab":
        table.pin(key)
    table.unpin("a")
    assert table.can_allocate(4) and not table.can_allocate(5)
    with pytest.raises(ValueError, match="room for 5 rows"):
        table.allocate("d", 5)
    assert held(table) == "abc", "a refusal evicts nothing"
    table.allocate("d", 4)
    assert held(table) == "abd"
    table.clear()
    assert held(table) == "abd"
    for key in "ab":
        table.unpin(key)
    table.clear()
    assert held(table) == "d"


def test_freed_while_pinned_it_is_a_miss_and_goes_with_the_last_pin():
    table = filled(2, a=8)
    for _ in range(2):
        table.pin("a")
    table.free("a")
    assert table.get_block_ids("a") is None and not table.can_allocate(1)
    table.unpin("a")
    assert held(table) == "a"
    table.unpin("a")
    assert held(table) == "" and table.can_allocate(8)


def test_a_freed_key_that_is_allocated_again_stays():
    table = filled(2, a=8)
    table.pin("a")
    table.free("a")
    table.allocate("a", 8)
    table.mark_written("a")
    table.unpin("a")
    assert held(table) == "a" and "a" in table and "b" not in table


def test_a_failed_step_gives_its_blocks_back():
    table = filled(2, a=4)
    table.allocate("b", 4)
    table.free("b")
    table.free("never there")
    assert held(table) == "a" and table.can_allocate(8)


def test_a_cache_without_blocks_has_room_for_nothing():
    table = EncoderCacheTable(0, 256)
    assert not table.can_allocate(1) and table.get_block_ids("a") is None


@pytest.mark.parametrize("seed", range(5))
def test_no_block_is_lost_in_a_random_life(seed):
    rng = random.Random(seed)
    table = EncoderCacheTable(12, 4)
    pins: list[int] = []
    for _ in range(600):
        key, rows = rng.randrange(20), rng.randint(1, 20)
        action = rng.choice(["allocate", "allocate", "write", "pin", "unpin", "get", "free", "clear"])
        entry = table.entries.get(key)
        if action == "allocate" and key not in pins:
            room = table.can_allocate(rows) or (entry is not None and entry.num_rows == rows)
            if room:
                assert len(table.allocate(key, rows)) == -(-rows // 4)
        elif action == "write" and entry is not None:
            table.mark_written(key)
        elif action == "pin" and entry is not None:
            table.pin(key)
            pins.append(key)
        elif action == "unpin" and pins:
            table.unpin(pins.pop(rng.randrange(len(pins))))
        elif action == "get":
            assert (table.get_block_ids(key) is not None) == (entry is not None and entry.is_written)
        elif action == "free":
            table.free(key)
        elif action == "clear" and rng.random() < 0.1:
            table.clear()
        table.check_integrity()
        assert all(key in table.entries for key in pins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_as_they_were_written(dtype):
    cache = EncoderCacheManager(num_blocks=8, block_size=4, hidden_size=6, dtype=dtype, device="cpu")
    written = {}
    for round_ in range(30):
        rows = torch.randn(1 + 5 * round_ % 17, 6).to(dtype)
        ids = cache.allocate(round_, len(rows))
        cache.write(ids, rows)
        written[round_] = rows
        for key in list(cache.entries):
            ids = cache.get_block_ids(key)
            assert ids is not None and torch.equal(cache.read(ids, len(written[key])), written[key])
        first, stop = sorted((round_ % len(rows), len(rows)))
        assert torch.equal(cache.read(cache.entries[round_].block_ids, stop, first), rows[first:stop])
    cache.check_integrity()


def test_two_engines_keep_their_rows_apart():
    caches = [EncoderCacheManager(2, 4, hidden, torch.float32, "cpu") for hidden in (8, 16)]
    for cache, hidden in zip(caches, (8, 16)):
        cache.write(cache.allocate("same key", 5), torch.full((5, hidden), float(hidden)))
    for cache, hidden in zip(caches, (8, 16)):
        ids = cache.get_block_ids("same key")
        assert ids is not None and (cache.read(ids, 5) == torch.full((5, hidden), float(hidden))).all()


def test_released_rows_take_no_memory():
    cache = EncoderCacheManager(4, 256, 64, torch.float32, "cpu")
    cache.release_rows()
    assert cache.rows.untyped_storage().nbytes() == 0
