"""Which images' KV lies in the pool, computed in full, by image and by how many images stood before it."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from nanovllm.engine.block_pool import Block, BlockPool


@dataclass(eq=False, slots=True)
class ImageKVEntry:
    """The KV of one image that was computed in full: rows [img_start, img_end) of the sequence it was computed in."""

    block_table: list[int]       # of the source sequence up to the image's end; -1 before the image: not held
    img_start: int
    img_end: int
    key: Hashable = None
    ordinal: int = 0             # images and videos before it in its prompt
    position: int = 0            # rotary position of its first token
    exact: bool = True           # no reused row stood before it

    @property
    def num_tokens(self) -> int:
        return self.img_end - self.img_start

    @property
    def held_blocks(self) -> list[int]:
        return [block_id for block_id in self.block_table if block_id >= 0]


class ImageKVTable:
    """Up to `max_variants` entries an image, one per ordinal: rows carry which image of the prompt they are."""

    def __init__(self, pool: BlockPool, max_variants: int) -> None:
        self.pool = pool
        self.max_variants = max_variants
        self.images: dict[Hashable, dict[int, ImageKVEntry]] = {}      # variants of an image: newest last
        self.num_evicted = 0

    @property
    def num_entries(self) -> int:
        return sum(map(len, self.images.values()))

    def get(self, key: Hashable, ordinal: int | None = None, nearest: bool = False) -> ImageKVEntry | None:
        """The variant of `ordinal`, with `nearest` the closest one if it is missing; without an ordinal the newest."""
        variants = self.images.get(key)
        if not variants:
            return None
        if ordinal is None:
            return next(reversed(variants.values()))
        if ordinal in variants or not nearest:
            return variants.get(ordinal)
        return min(variants.values(), key=lambda entry: (abs(entry.ordinal - ordinal), entry.ordinal))

    def put(self, entry: ImageKVEntry) -> None:
        """Records an entry; one of the same image and ordinal gives way only if it is not exact and the new one is."""
        variants = self.images.setdefault(entry.key, {})
        old = variants.get(entry.ordinal)
        if old is not None and (old.exact or not entry.exact):
            self.touch(old)
            return
        if old is not None:
            self.drop(old)
        elif len(variants) == self.max_variants:
            self.drop(next(iter(variants.values())))
        self.images.setdefault(entry.key, {})[entry.ordinal] = entry
        for block_id in entry.held_blocks:
            self.pool.blocks[block_id].entries.append(entry)

    def touch(self, entry: ImageKVEntry) -> None:
        """Makes an entry the newest variant of its image, and its blocks the last to be evicted."""
        variants = self.images[entry.key]
        variants[entry.ordinal] = variants.pop(entry.ordinal)
        for block_id in entry.held_blocks:
            self.pool.touch(block_id)

    def drop(self, entry: ImageKVEntry) -> None:
        variants = self.images[entry.key]
        del variants[entry.ordinal]
        if not variants:
            del self.images[entry.key]
        for block_id in entry.held_blocks:
            block = self.pool.blocks[block_id]
            block.entries.remove(entry)
            self.pool.settle(block)

    def forget_block(self, block: Block) -> None:
        """An entry never outlives one of its blocks."""
        for entry in list(block.entries):
            self.drop(entry)
            self.num_evicted += 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless every entry's blocks name it, and no block names an entry that is gone."""
        entries = [entry for variants in self.images.values() for entry in variants.values()]
        for entry in entries:
            assert all(entry in self.pool.blocks[block_id].entries for block_id in entry.held_blocks)
        held = sum(len(block.entries) for block in self.pool.blocks)
        assert held == sum(len(entry.held_blocks) for entry in entries), "a block names an entry that is gone"


def block_range(start: int, stop: int, block_size: int) -> range:
    """Indices of the blocks that rows [start, stop) touch."""
    return range(start // block_size, (stop - 1) // block_size + 1)


def held_table(block_table: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """A block table cut at `stop` that holds only the blocks of rows [start, stop)."""
    held = block_range(start, stop, block_size)
    return [block_table[i] if i in held else -1 for i in range(held.stop)]
