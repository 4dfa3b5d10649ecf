"""Which rows of an image that is in the image-KV table are computed, which are copied, and which blocks are shared."""
from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanovllm.engine.image_kv_table import ImageKVEntry
from nanovllm.engine.sequence import Range
from nanovllm.plan import KVCopy


def compress_ratios(ratio: float | SequenceOf[float]) -> tuple[float, ...] | None:
    """A ratio, or one per layer, as a tuple of length 1 or num_layers; None where nothing would be reused (0.0: off,
    1.0: every row computed)."""
    ratios = (float(ratio),) if isinstance(ratio, (int, float)) else tuple(map(float, ratio))
    if len(set(ratios)) == 1:
        ratios = ratios[:1]
    return None if ratios in ((0.0,), (1.0,)) else ratios


@dataclass(frozen=True, slots=True)
class RowsOfImage:
    """One reused image in its new sequence: rows [start, stop), of which [start, computed_until[t]) are computed in
    tier t of layers, but for those an exact prefix hit covers and for the sequence's last token."""

    start: int
    stop: int
    computed_until: tuple[int, ...]       # per tier, not increasing
    hit_until: int                        # rows before it come from the prefix cache

    def skipped(self, tier: int) -> Range:
        """Rows that are not computed in a tier because their reused KV stands."""
        return max(self.hit_until, self.computed_until[tier]), self.stop

    @property
    def reuses_any(self) -> bool:
        start, stop = self.skipped(len(self.computed_until) - 1)
        return start < stop

    @property
    def num_computed(self) -> int:
        return max(0, self.computed_until[0] - max(self.start, self.hit_until))


@dataclass(slots=True)
class ReusePlan:
    """All that one sequence takes from the image-KV table."""

    first_layers: tuple[int, ...]                       # per tier: the layer it starts at, beginning with 0
    images: dict[int, RowsOfImage] = field(default_factory=dict)       # by index in the sequence's images
    copies: list[KVCopy] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)     # source blocks held until the copies are done
    copies_planned: bool = False                        # a step that carries the copies is on its way, or done

    @property
    def num_recomputed(self) -> int:
        return sum(rows.num_computed for rows in self.images.values())

    @property
    def num_reused(self) -> int:
        return sum(stop - start for start, stop in self.skips(0))

    @property
    def first_row(self) -> int:
        """The first row of the sequence that holds reused KV in any layer."""
        return min(start for start, _ in self.skips(len(self.first_layers) - 1))

    def skips(self, tier: int) -> list[Range]:
        """Ranges of rows, in order and not empty, that are not computed in a tier."""
        ranges = [rows.skipped(tier) for rows in self.images.values()]
        return sorted(r for r in ranges if r[0] < r[1])

    def tier_at(self, layer: int) -> int:
        return max(t for t, first in enumerate(self.first_layers) if first <= layer)


def tiers_of(ratios: tuple[float, ...]) -> tuple[tuple[int, float], ...]:
    """(first layer, ratio) of each run of layers with one ratio."""
    return tuple((layer, ratio) for layer, ratio in enumerate(ratios) if layer == 0 or ratio != ratios[layer - 1])


def rows_of_image(start: int, stop: int, ratios: tuple[float, ...], hit_until: int, num_tokens: int) -> RowsOfImage:
    """Leading `ceil(ratio * n)` rows are computed in each tier (VLCache, arXiv 2512.12977: an early row's error reaches
    everything behind it); the last token of the sequence always is, so an image at its end gives up its last row."""
    n = stop - start
    return RowsOfImage(start, min(stop, num_tokens - 1), hit_until=hit_until, computed_until=tuple(
        min(start + math.ceil(ratio * n), stop, num_tokens - 1) for _, ratio in tiers_of(ratios)))


def copies_of_image(rows: RowsOfImage, entry: ImageKVEntry, ratios: tuple[float, ...], delta: int,
                    block_table: SequenceOf[int], shared: Range) -> list[KVCopy]:
    """The copies that fill a reused image's rows but for [shared), whose blocks stand in both block tables."""
    tiers = [sum(first <= layer for first, _ in tiers_of(ratios)) - 1 for layer in range(len(ratios))]
    first, stop = rows.skipped(tiers[-1])
    parts = [(first, shared[0]), (shared[1], stop)] if shared[0] < shared[1] else [(first, stop)]
    return [KVCopy(source_blocks=tuple(entry.block_table), source_start=entry.img_start + a - rows.start,
                   target_blocks=tuple(block_table), target_start=a, num_tokens=b - a, delta=delta,
                   first_rows=tuple(min(max(rows.skipped(t)[0] - a, 0), b - a) for t in tiers))
            for a, b in parts if a < b]


def shared_blocks(rows: RowsOfImage, entry: ImageKVEntry, delta: int, block_size: int) -> range:
    """Indices of the target's blocks that the entry's own blocks can stand in for: no rotation, same place in the
    block, and no row that any layer computes."""
    if delta or (rows.start - entry.img_start) % block_size:
        return range(0)
    first, stop = rows.skipped(0)
    return range(-(-first // block_size), max(-(-first // block_size), stop // block_size))
