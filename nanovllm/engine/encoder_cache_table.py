"""Who is in the encoder cache: which rows of its blocks belong to which image, who goes first, and who must stay."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class EncoderCacheEntry:
    """The blocks of one image, and whether its rows are in them yet."""

    block_ids: list[int]
    num_rows: int
    is_written: bool = False
    is_freed: bool = False      # its blocks go back with the last pin
    pins: int = 0

    @property
    def is_evictable(self) -> bool:
        """Not one that somebody reads, nor one that is still to be written."""
        return self.is_written and self.pins == 0


class EncoderCacheTable:
    """Blocks of encoder rows by image key, evicted in LRU order when room is needed; numbers only, no rows.

    An entry is a hit from the moment its rows are written. Until then it is a miss, and its blocks stay its own:
    whoever allocated it writes it (`mark_written`) or gives it back (`free`).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size              # encoder rows of a block
        self.entries: OrderedDict[Hashable, EncoderCacheEntry] = OrderedDict()      # oldest first
        self.owners: dict[int, Hashable] = {}     # block -> key of the entry that holds it
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.num_hits = 0
        self.num_misses = 0

    def blocks_of(self, num_rows: int) -> int:
        """Number of blocks that `num_rows` rows fill."""
        return -(-num_rows // self.block_size)

    def can_allocate(self, num_rows: int) -> bool:
        """Whether a new image of `num_rows` rows finds room, evictions counted."""
        missing = self.blocks_of(num_rows) - len(self.free_blocks)
        if missing <= 0:
            return True
        return missing <= sum(len(entry.block_ids) for entry in self.entries.values() if entry.is_evictable)

    def allocate(self, key: Hashable, num_rows: int) -> list[int]:
        """Blocks for the `num_rows` rows of a new image.

        A key that has blocks for as many rows keeps them and is to be written again. Raises ValueError, and evicts
        nothing, where `can_allocate` says no.
        """
        assert num_rows > 0, f"an image of {num_rows} rows"
        entry = self.entries.get(key)
        if entry is not None and entry.num_rows == num_rows:
            self.entries.move_to_end(key)
            entry.is_written = entry.is_freed = False
            return list(entry.block_ids)
        if entry is not None:
            assert entry.pins == 0, f"{key} is read as an image of {entry.num_rows} rows, not {num_rows}"
            self._drop(key)
        if not self.can_allocate(num_rows):
            raise ValueError(f"an encoder cache of {self.num_blocks} blocks of {self.block_size} rows has no room for "
                             f"{num_rows} rows; ask can_allocate first, or raise encoder_cache_ratio")
        while len(self.free_blocks) < self.blocks_of(num_rows):
            self._drop(next(key for key, entry in self.entries.items() if entry.is_evictable))
        block_ids = [self.free_blocks.pop() for _ in range(self.blocks_of(num_rows))]
        self.entries[key] = EncoderCacheEntry(block_ids, num_rows)
        self.owners.update(dict.fromkeys(block_ids, key))
        return list(block_ids)

    def mark_written(self, key: Hashable) -> None:
        """From now on the entry is a hit."""
        self.entries[key].is_written = True

    def get_block_ids(self, key: Hashable) -> list[int] | None:
        """Blocks of an image whose rows are written, which becomes the newest; else None."""
        entry = self.entries.get(key)
        if entry is None or not entry.is_written:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self.entries.move_to_end(key)
        return list(entry.block_ids)

    def __contains__(self, key: Hashable) -> bool:
        """Whether the rows of `key` are written; neither a hit nor a miss."""
        return key in self.entries and self.entries[key].is_written

    def pin(self, key: Hashable) -> None:
        """The entry stays until `unpin`, which is called as often as this."""
        self.entries[key].pins += 1

    def unpin(self, key: Hashable) -> None:
        entry = self.entries[key]
        assert entry.pins > 0, f"{key} is not pinned"
        entry.pins -= 1
        if entry.is_freed and entry.pins == 0:
            self._drop(key)

    def free(self, key: Hashable) -> None:
        """Gives the blocks of `key` back, written or not; while pinned it is a miss. It need not be there."""
        entry = self.entries.get(key)
        if entry is not None and entry.pins:
            entry.is_freed, entry.is_written = True, False
        elif entry is not None:
            self._drop(key)

    def clear(self) -> None:
        """Forgets every entry that could be evicted."""
        for key in [key for key, entry in self.entries.items() if entry.is_evictable]:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        entry = self.entries.pop(key)
        for block_id in entry.block_ids:
            del self.owners[block_id]
        self.free_blocks.extend(reversed(entry.block_ids))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or held by exactly one entry."""
        held = [block_id for entry in self.entries.values() for block_id in entry.block_ids]
        assert sorted(held + self.free_blocks) == list(range(self.num_blocks)), "a block is lost or held twice"
        for key, entry in self.entries.items():
            assert len(entry.block_ids) == self.blocks_of(entry.num_rows) and entry.pins >= 0, key
            assert all(self.owners[block_id] == key for block_id in entry.block_ids), key
        assert len(self.owners) == len(held), "a free block has an owner"
