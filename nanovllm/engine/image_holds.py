"""Keeps what a request without pixels depends on, from its arrival until its images are computed."""
from __future__ import annotations

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.encoder_cache_table import EncoderCacheTable
from nanovllm.engine.sequence import Sequence
from nanovllm.image.items import ImageItem


class ImageHolds:
    """Pins encoder rows, image-KV entries and prefix blocks for sequences whose images came by name alone."""

    def __init__(self, block_manager: BlockManager, encoder_cache: EncoderCacheTable) -> None:
        self.block_manager = block_manager
        self.encoder_cache = encoder_cache

    def missing(self, seq: Sequence) -> str | None:
        """What to tell the caller of the first image that has no pixels while rows of it would have to be encoded."""
        if not lacks_pixels(seq):
            return None
        for index in self.block_manager.images_to_compute(seq):
            image = seq.images[index]
            if by_name_only(image) and image.key not in self.encoder_cache:
                return (f"image {index} of the prompt (image_hashes: {image.caller_hash}) came without pixel_values, "
                        f"and what it needs is not cached, or no longer: pass its pixel_values")
        return None

    def take(self, seq: Sequence) -> None:
        """Holds all that is cached of the sequence's images while it waits."""
        if lacks_pixels(seq):
            self.keep_rows(seq)
            seq.held_blocks = self.block_manager.hold(seq)

    def can_allocate(self, seq: Sequence) -> bool:
        """Whether the sequence can be admitted without evicting what it needs itself; if so, that is held until then.

        Where all encoder rows are there, it needs nothing else. One that was preempted held no blocks while it waited,
        and holds none afterwards if it cannot be admitted.
        """
        before = seq.held_blocks
        if all(image.key in self.encoder_cache for image in seq.images if by_name_only(image)):
            seq.held_blocks = []
        else:
            seq.held_blocks = self.block_manager.hold(seq)
        self.block_manager.unhold(before)
        fits = self.block_manager.can_allocate(seq)
        if not fits and not before:
            self.keep_rows(seq)
        return fits

    def keep_rows(self, seq: Sequence) -> None:
        """Holds encoder rows alone, those that are there now: an admitted sequence has its blocks itself, and a
        preempted one may not stand in the way of others."""
        self.give(seq)
        for image in seq.images:
            if by_name_only(image) and image.key in self.encoder_cache:
                self.encoder_cache.pin(image.key)
                seq.held_rows.append(image.key)

    def give(self, seq: Sequence) -> None:
        """Returns every hold."""
        self.block_manager.unhold(seq.held_blocks)
        seq.held_blocks = []
        for key in seq.held_rows:
            self.encoder_cache.unpin(key)
        seq.held_rows = []


def lacks_pixels(seq: Sequence) -> bool:
    return any(map(by_name_only, seq.images))


def by_name_only(image: ImageItem) -> bool:
    return image.caller_hash is not None and image.pixels is None
