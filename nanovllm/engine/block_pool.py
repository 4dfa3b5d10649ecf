"""The KV blocks of one engine: each is read by someone, or cached and evictable in LRU order, or free."""
from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.image_kv_table import ImageKVEntry
    from nanovllm.engine.prefix_tree import PrefixNode


class Block:
    """One KV block: how many sequences read it now, and what makes its content worth keeping when none does."""

    __slots__ = ("block_id", "readers", "nodes", "entries")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.readers = 0
        self.nodes: list[PrefixNode] = []         # its keys in the prefix tree, one per namespace
        self.entries: list[ImageKVEntry] = []     # images whose KV lies in it

    @property
    def is_cached(self) -> bool:
        return bool(self.nodes or self.entries)


class BlockPool:
    """Hands out blocks; whoever changes a block's readers, keys or entries does it through here or calls `settle`."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free = list(range(num_blocks - 1, -1, -1))        # the last one given back goes first: its memory is warm
        self.lru: OrderedDict[int, None] = OrderedDict()       # cached blocks nobody reads, oldest first

    @property
    def num_available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that nobody reads."""
        return len(self.free) + len(self.lru)

    def pop_free(self) -> int:
        """A block without content, with one reader."""
        block_id = self.free.pop()
        self.blocks[block_id].readers = 1
        return block_id

    def oldest_cached(self) -> int:
        return next(iter(self.lru))

    def acquire(self, block_id: int) -> None:
        """One more reader of a block that is cached or read already."""
        block = self.blocks[block_id]
        if block.readers == 0:
            del self.lru[block_id]
        block.readers += 1

    def release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        assert block.readers > 0, block_id
        block.readers -= 1
        if block.readers == 0:
            if block.is_cached:
                self.lru[block_id] = None
            else:
                self.free.append(block_id)

    def settle(self, block: Block) -> None:
        """Frees a block that nobody reads and that has just lost its last key or entry."""
        if block.readers == 0 and not block.is_cached:
            del self.lru[block.block_id]
            self.free.append(block.block_id)

    def touch(self, block_id: int) -> None:
        if block_id in self.lru:
            self.lru.move_to_end(block_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one of: read, cached and unread, free."""
        free, cached = set(self.free), set(self.lru)
        assert len(free) == len(self.free), "a block is free twice"
        for block in self.blocks:
            where = (block.readers > 0, block.block_id in cached, block.block_id in free)
            assert sum(where) == 1, f"block {block.block_id}: read, cached, free = {where}"
            assert block.readers >= 0 and (block.readers > 0 or where[1] == block.is_cached), block.block_id
