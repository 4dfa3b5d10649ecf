"""Decides which images a step encodes and where the rows of each computed placeholder come from."""
from __future__ import annotations

import logging
from collections.abc import Hashable

from nanovllm.engine.encoder_cache_table import EncoderCacheTable
from nanovllm.engine.scheduled import ScheduledStep
from nanovllm.engine.sequence import Range, Sequence
from nanovllm.image.items import ImageItem
from nanovllm.plan import ImageEncode, ImageRows

logger = logging.getLogger(__name__)


class ImagePlanner:
    """Reads rows from the encoder cache, encodes an image once a step at most, and only if a row of it is needed.

    Keys that a step reads or writes stay pinned until its result is in, so nothing of the same or the next step can
    take their place. Rows count as cached only once the step that encoded them has succeeded; a step that follows one
    in flight may read what that one encodes, since it is dropped with it.
    """

    def __init__(self, encoder_cache: EncoderCacheTable) -> None:
        self.encoder_cache = encoder_cache
        self.coming: dict[Hashable, tuple[int, ...]] = {}       # encoder cache blocks that steps in flight are filling

    def plan(self, step: ScheduledStep, seq: Sequence, spans: list[Range]) -> None:
        """Adds to the step what the image placeholders in these spans of a sequence need."""
        target = step.num_tokens
        for start, stop in spans:
            for image in seq.images:
                first, last = max(start, image.start), min(stop, image.stop)
                if first < last:
                    block_ids = self._rows_of(step, seq, image)
                    step.image_rows.append(ImageRows(image.key, image.num_tokens, block_ids, first - image.start,
                                                     last - image.start, target + first - start))
            target += stop - start

    def _rows_of(self, step: ScheduledStep, seq: Sequence, image: ImageItem) -> tuple[int, ...] | None:
        if image.key in step.encoding:
            return step.encoding[image.key]
        held = self.coming.get(image.key) or self.encoder_cache.get_block_ids(image.key)
        block_ids = None if held is None else tuple(held)
        if block_ids is None:
            block_ids = self._make_room(image)
            step.encodes.append(ImageEncode(image.key, image.grid, image.pixels, block_ids, seq.seq_id))
            if block_ids is not None:
                self.coming[image.key] = block_ids
        if block_ids is not None:
            self.encoder_cache.pin(image.key)
            step.pinned.append(image.key)
        step.encoding[image.key] = block_ids
        return block_ids

    def _make_room(self, image: ImageItem) -> tuple[int, ...] | None:
        if self.encoder_cache.can_allocate(image.num_tokens):
            return tuple(self.encoder_cache.allocate(image.key, image.num_tokens))
        logger.info("an image of %d tokens finds no room in the encoder cache and is encoded for this step alone; "
                    "raise encoder_cache_ratio to keep it", image.num_tokens)
        return None

    def commit(self, step: ScheduledStep) -> None:
        """The step succeeded: its encoded rows may be read by others."""
        for encode in step.encodes:
            if encode.block_ids is not None:
                del self.coming[encode.key]
                self.encoder_cache.mark_written(encode.key)
        self._unpin(step)

    def abandon(self, step: ScheduledStep) -> None:
        """The step failed: nobody knows what its rows hold."""
        self._unpin(step)
        for encode in step.encodes:
            if encode.block_ids is not None:
                del self.coming[encode.key]
                self.encoder_cache.free(encode.key)

    def _unpin(self, step: ScheduledStep) -> None:
        for key in step.pinned:
            self.encoder_cache.unpin(key)
