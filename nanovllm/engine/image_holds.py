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
            self.take_rows(seq)
            seq.held_blocks = self.block_manager.hold(seq)

    def take_rows(self, seq: Sequence) -> None:
        """Holds encoder rows alone: what a preempted sequence may keep without standing in the way of others."""
        for image in seq.images:
            if by_name_only(image) and image.key in self.encoder_cache:
                self.encoder_cache.pin(image.key)
                seq.held_rows.append(image.key)

    def give_blocks(self, seq: Sequence) -> None:
        """Once admitted, the sequence holds its blocks itself."""
        self.block_manager.unhold(seq.held_blocks)
        seq.held_blocks = []

    def give(self, seq: Sequence) -> None:
        """Returns every hold."""
        self.give_blocks(seq)
        for key in seq.held_rows:
            self.encoder_cache.unpin(key)
        seq.held_rows = []


def lacks_pixels(seq: Sequence) -> bool:
    return any(map(by_name_only, seq.images))


def by_name_only(image: ImageItem) -> bool:
    return image.caller_hash is not None and image.pixels is None
