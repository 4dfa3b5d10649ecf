"""Gives sequences their KV blocks, filled as far as the prefix cache and the image-KV table can fill them."""
from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf

from nanovllm.engine import image_reuse
from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.image_kv_table import ImageKVEntry, ImageKVTable, held_table
from nanovllm.engine.prefix_tree import BlockKey, PrefixNode, PrefixTree
from nanovllm.engine.sequence import Sequence
from nanovllm.metrics import Usage

__all__ = ["BlockManager", "ImageKVEntry"]


class BlockManager:
    """Owner of the KV blocks.

    Order of what fills a sequence's blocks: exact prefix hits, hits in the namespace of the sequence's ratio, image KV,
    computation. Blocks that hold or follow a reused row are keyed in that namespace and so are never exact hits.
    """

    def __init__(self, num_blocks: int, block_size: int, recompute_ratio: float | SequenceOf[float] = 0.0, *,
                 enable_prefix_caching: bool = True, image_kv_variants: int = 4,
                 reuse_any_ordinal: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.recompute_ratio = recompute_ratio
        self.enable_prefix_caching = enable_prefix_caching
        self.reuse_any_ordinal = reuse_any_ordinal
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixTree(self.pool)
        self.image_kv = ImageKVTable(self.pool, image_kv_variants)

    # ------------------------------------------------------------ blocks of a sequence

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether the blocks for all of the sequence's known tokens can be had now."""
        hits = self._find_prefix(seq)
        unread = sum(self.pool.blocks[block_id].readers == 0 for block_id in map(_block_id, hits))
        return self.num_blocks_for(len(seq)) - len(hits) <= self.pool.num_available - unread

    def allocate(self, seq: Sequence) -> None:
        """Blocks for all known tokens; the leading ones are prefix hits, and the last token is never among those."""
        assert not seq.block_table
        if self.ratios_of(seq) is not None:                 # what it will reuse is the last that it evicts
            for entry in filter(None, (self.find_reusable(seq, i) for i in range(len(seq.images)))):
                self.image_kv.touch(entry)
        hits = self._find_prefix(seq)
        for node in hits:
            self.pool.acquire(_block_id(node))
        seq.block_table = [_block_id(node) for node in hits]
        seq.block_table += [self._take() for _ in range(self.num_blocks_for(len(seq)) - len(hits))]
        seq.num_cached_tokens = seq.num_planned = seq.num_computed = len(hits) * self.block_size
        seq.num_published = len(hits)
        seq.prefix_node = hits[-1] if hits else self.prefixes.root
        inexact = [i for i, node in enumerate(hits) if _namespace(node.key) is not None]
        if inexact:
            seq.approximate = (inexact[0] * self.block_size, seq.num_cached_tokens)

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) - len(seq.block_table) <= self.pool.num_available

    def append(self, seq: Sequence, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens in all."""
        while len(seq.block_table) * self.block_size < num_tokens:
            seq.block_table.append(self._take())

    def deallocate(self, seq: Sequence) -> None:
        """Returns every reference the sequence holds; what is cached stays until its blocks are needed."""
        self.release_sources(seq)
        for block_id in reversed(seq.block_table):      # the tail is evicted first: a prefix is worth more
            self.pool.release(block_id)
        seq.forget_kv()

    def _take(self) -> int:
        if not self.pool.free:
            self.forget([self.pool.oldest_cached()])
        return self.pool.pop_free()

    def forget(self, block_ids: Iterable[int]) -> None:
        """Forgets what is cached in some blocks; sequences that read them go on reading."""
        for block_id in block_ids:
            self.prefixes.forget_block(self.pool.blocks[block_id])
            self.image_kv.forget_block(self.pool.blocks[block_id])

    def reset(self) -> None:
        """Forgets all cached content."""
        self.forget(range(self.num_blocks))

    # ------------------------------------------------------------ prefix cache

    def publish(self, seq: Sequence) -> None:
        """Keys the full blocks that the host has seen computed."""
        if not self.enable_prefix_caching or not seq.images_known:
            return
        assert seq.prefix_node is not None
        if not self.prefixes.is_alive(seq.prefix_node):     # its blocks were another's and have been evicted
            seq.prefix_node, seq.num_published = self.prefixes.root, 0
        exact_until, namespace = seq.approximate_from, self._namespace_of(seq)
        while (seq.num_published + 1) * self.block_size <= seq.num_computed:
            i = seq.num_published
            exact = exact_until is None or (i + 1) * self.block_size <= exact_until
            key = self._key(seq, i, None if exact else namespace)
            seq.prefix_node = self.prefixes.insert(seq.prefix_node, key, seq.block_table[i])
            seq.num_published += 1

    def _find_prefix(self, seq: Sequence) -> list[PrefixNode]:
        """Nodes of the longest cached prefix that leaves the last token to compute."""
        hits: list[PrefixNode] = []
        if not self.enable_prefix_caching or not seq.images_known:
            return hits
        node: PrefixNode | None = self.prefixes.root
        namespace, exact = self._namespace_of(seq), True
        for i in range((len(seq) - 1) // self.block_size):
            parent, node = node, None
            assert parent is not None
            if exact:
                node = parent.children.get(self._key(seq, i, None))
            if node is None and namespace is not None:
                node = parent.children.get(self._key(seq, i, namespace))
                exact = False
            if node is None:
                break
            hits.append(node)
        return hits

    def _key(self, seq: Sequence, i: int, namespace: Hashable) -> BlockKey:
        """Content of full block i: salt, namespace, its images with where they start, and its ids."""
        start, stop = i * self.block_size, (i + 1) * self.block_size
        while len(seq.block_bytes) <= i:
            first = len(seq.block_bytes) * self.block_size
            seq.block_bytes.append(seq.id_bytes(first, first + self.block_size))
        images = tuple((image.kv_key, image.start - start) for image in seq.images
                       if image.start < stop and start < image.stop)
        return seq.sampling_params.cache_salt, namespace, images, seq.block_bytes[i]

    # ------------------------------------------------------------ image KV

    @property
    def image_kv_cache(self) -> dict[Hashable, dict[int, ImageKVEntry]]:
        """Entries by image, then by ordinal."""
        return self.image_kv.images

    def get_image_kv_entry(self, key: Hashable, ordinal: int | None = None) -> ImageKVEntry | None:
        return self.image_kv.get(key, ordinal)

    def ratios_of(self, seq: Sequence) -> tuple[float, ...] | None:
        """The request's ratio, or the engine's; None where it reuses nothing."""
        own = seq.sampling_params.recompute_ratio
        return image_reuse.compress_ratios(self.recompute_ratio if own is None else own)

    def _any_ordinal(self, seq: Sequence) -> bool:
        own = seq.sampling_params.reuse_any_ordinal
        return self.reuse_any_ordinal if own is None else own

    def _namespace_of(self, seq: Sequence) -> Hashable:
        ratios = self.ratios_of(seq)
        return None if ratios is None else (ratios, self._any_ordinal(seq))

    def find_reusable(self, seq: Sequence, index: int) -> ImageKVEntry | None:
        """The entry that image `index` of the sequence may be filled from."""
        image = seq.images[index]
        entry = self.image_kv.get(image.kv_key, index, nearest=self._any_ordinal(seq))
        same_size = entry is not None and entry.num_tokens == image.stop - image.start
        return entry if same_size else None

    def try_partial_recompute(self, seq: Sequence, image_token_id: int) -> bool:
        """Plans the reuse of every image that the table holds and prefix hits do not cover; True if there is any."""
        ratios = self.ratios_of(seq)
        if ratios is None:
            return False
        seq.find_image_token_range(image_token_id)
        plan = image_reuse.ReusePlan(tuple(layer for layer, _ in image_reuse.tiers_of(ratios)))
        for index, image in enumerate(seq.images):
            entry = self.find_reusable(seq, index)
            if entry is not None and image.stop > seq.num_cached_tokens:
                rows = image_reuse.rows_of_image(image.start, image.stop, ratios, seq.num_cached_tokens, len(seq))
                if rows.reuses_any:
                    self._reuse_image(seq, plan, index, rows, entry, ratios)
        if not plan.images:
            return False
        seq.reuse = plan
        return True

    def _reuse_image(self, seq: Sequence, plan: image_reuse.ReusePlan, index: int, rows: image_reuse.RowsOfImage,
                     entry: ImageKVEntry, ratios: tuple[float, ...]) -> None:
        plan.images[index] = rows
        delta = seq.position_of(rows.start) - entry.position
        shared = image_reuse.shared_blocks(rows, entry, delta, self.block_size)
        for i in shared:
            source = entry.block_table[i + (entry.img_start - rows.start) // self.block_size]
            self.pool.acquire(source)
            self.pool.release(seq.block_table[i])
            seq.block_table[i] = source
        ends = (shared.start * self.block_size, shared.stop * self.block_size)
        copies = image_reuse.copies_of_image(rows, entry, ratios, delta, seq.block_table, ends)
        if copies:
            plan.copies += copies
            plan.pinned += entry.held_blocks
            for block_id in entry.held_blocks:
                self.pool.acquire(block_id)

    def images_to_compute(self, seq: Sequence) -> list[int]:
        """Indices of the images of which a row would be computed if the sequence were admitted now."""
        ratios = self.ratios_of(seq)
        hit_until = len(self._find_prefix(seq)) * self.block_size
        needed = []
        for index, image in enumerate(seq.images):
            entry = self.find_reusable(seq, index) if ratios else None
            if entry is not None and ratios is not None:
                rows = image_reuse.rows_of_image(image.start, image.stop, ratios, hit_until, len(seq))
                computed = rows.num_computed > 0 or image.stop == len(seq)
            else:
                computed = image.stop > hit_until
            if computed:
                needed.append(index)
        return needed

    def hold(self, seq: Sequence) -> list[int]:
        """Pins the prefix hits and image-KV entries that the sequence would use now; the block ids, for `unhold`."""
        held = [_block_id(node) for node in self._find_prefix(seq)]
        if self.ratios_of(seq) is not None:
            behind = [i for i, image in enumerate(seq.images) if image.stop > len(held) * self.block_size]
            for entry in filter(None, (self.find_reusable(seq, i) for i in behind)):
                held += entry.held_blocks
        for block_id in held:
            self.pool.acquire(block_id)
        return held

    def unhold(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.pool.release(block_id)

    def release_sources(self, seq: Sequence) -> None:
        """Unpins the blocks that a sequence's copies read, once they have been read or never will be."""
        if seq.reuse is not None:
            self.unhold(seq.reuse.pinned)
            seq.reuse.pinned = []

    def store_image_kv(self, seq: Sequence, indices: Iterable[int] | None = None) -> None:
        """Records images of a sequence whose rows were all computed in full, which is the caller's to know."""
        for index in range(len(seq.images)) if indices is None else indices:
            image = seq.images[index]
            inexact_from = seq.approximate_from
            self.image_kv.put(ImageKVEntry(
                held_table(seq.block_table, image.start, image.stop, self.block_size), image.start, image.stop,
                key=image.kv_key, ordinal=index, position=seq.position_of(image.start),
                exact=inexact_from is None or inexact_from >= image.start))

    def usage_of(self, seq: Sequence) -> Usage:
        """Where an allocated sequence's KV comes from."""
        reused = seq.reuse.images if seq.reuse else {}
        sought = range(len(seq.images)) if self.ratios_of(seq) is not None else ()
        missed = [i for i in sought if seq.images[i].stop > seq.num_cached_tokens and i not in reused]
        return Usage(seq.num_cached_tokens, seq.num_reused_tokens, seq.num_recompute_tokens, len(reused), len(missed))

    # ------------------------------------------------------------ invariants

    def check_integrity(self, seqs: Iterable[Sequence] | None = None) -> None:
        """Raises AssertionError if blocks, keys, entries and (when given, all live) sequences disagree."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        self.image_kv.check_integrity()
        if seqs is not None:
            readers = [0] * self.num_blocks
            for seq in seqs:
                for block_id in seq.block_table + seq.held_blocks + (seq.reuse.pinned if seq.reuse else []):
                    readers[block_id] += 1
            assert readers == [block.readers for block in self.pool.blocks], "a reference leaked or is missing"


def _block_id(node: PrefixNode) -> int:
    assert node.block is not None
    return node.block.block_id


def _namespace(key: BlockKey) -> Hashable:
    return key[1]
