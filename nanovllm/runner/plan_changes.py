"""What a step's numbers are beside those of the step before, which is all that the other ranks need to be told."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest

import numpy as np
from numpy.typing import NDArray

from nanovllm.plan import ImageEncode, ImageRows, IntArray, KVCopy, SamplingBatch, SpanTable, Stage, StepPlan


@dataclass(frozen=True, slots=True)
class PlanChanges:
    """A plan without what only rank 0, which samples, needs, as `PlanMemory.restore` takes it."""

    arrays: tuple[int | NDArray[np.int32], ...]     # what to add to an array of the last step, or a new array
    stages: tuple[tuple[int, int], ...]             # (first layer, width of the block tables) of each
    new_blocks: NDArray[np.int32]                   # [3, n] (batch row, place in its block table, block)
    encodes: tuple[ImageEncode, ...]
    image_rows: tuple[ImageRows, ...]
    copies: tuple[KVCopy, ...]


class PlanMemory:
    """What rank 0 has told the others, and, kept alike by each of them, what it has been told.

    An array whose numbers all went up by the same is sent as that one number: those of a batch that decodes do. Block
    tables are remembered by batch row, whoever holds it, so only blocks that are new to a row are sent.
    """

    def __init__(self) -> None:
        self.arrays: tuple[IntArray, ...] = ()
        self.tables = np.zeros((0, 0), np.int32)        # [batch rows, blocks]

    def changes(self, plan: StepPlan) -> PlanChanges:
        """On rank 0, for every plan, in their order."""
        last, self.arrays = self.arrays, tuple(_arrays(plan))
        new_blocks = self._new_blocks(plan.stages[0].spans)
        self._learn(new_blocks)
        return PlanChanges(
            tuple(_change(array, before) for array, before in zip_longest(self.arrays, last[:len(self.arrays)])),
            tuple((stage.first_layer, stage.spans.block_tables.shape[1]) for stage in plan.stages),
            new_blocks, plan.encodes, plan.image_rows, plan.copies)

    def restore(self, changes: PlanChanges) -> StepPlan:
        """On the other ranks: the plan."""
        last = self.arrays[:len(changes.arrays)]
        self.arrays = tuple(before + change if isinstance(change, int) else change.astype(np.int64)
                            for change, before in zip_longest(changes.arrays, last))
        self._learn(changes.new_blocks)
        arrays, stages = iter(self.arrays), []
        token_ids, positions, logits_rows, fed = islice(arrays, 4)
        for first_layer, width in changes.stages:
            rows = next(arrays) if first_layer else None
            starts, lengths, seq_rows = islice(arrays, 3)
            tables = self._known_tables(seq_rows, width)
            stages.append(Stage(first_layer, rows, SpanTable(starts, lengths, tables, seq_rows)))
        return StepPlan(token_ids, positions, tuple(stages), logits_rows, NOT_SAMPLED, fed, changes.encodes,
                        changes.image_rows, changes.copies)

    def _new_blocks(self, spans: SpanTable) -> NDArray[np.int32]:
        """What the tables of the first stage, whose spans are all of the step's, hold beyond what is known."""
        tables, width = spans.block_tables, spans.block_tables.shape[1]
        places = np.flatnonzero(self._known_tables(spans.seq_rows, width) != tables)
        if not len(places):
            return NO_BLOCKS
        return np.stack((spans.seq_rows[places // width], places % width, tables.ravel()[places])).astype(np.int32)

    def _known_tables(self, seq_rows: IntArray, width: int) -> NDArray[np.int32]:
        """A copy of what is known of some rows; what is not is 0."""
        self._make_room(int(seq_rows.max(initial=-1)) + 1, width)
        return self.tables[seq_rows, :width]

    def _learn(self, new_blocks: NDArray[np.int32]) -> None:
        if new_blocks.shape[1]:
            rows, places, blocks = new_blocks
            self._make_room(int(rows.max()) + 1, int(places.max()) + 1)
            self.tables[rows, places] = blocks

    def _make_room(self, num_rows: int, width: int) -> None:
        grow = max(0, num_rows - self.tables.shape[0]), max(0, width - self.tables.shape[1])
        if any(grow):
            self.tables = np.pad(self.tables, ((0, grow[0]), (0, grow[1])))


def _arrays(plan: StepPlan) -> Iterator[IntArray]:
    yield from (plan.token_ids, plan.positions, plan.logits_rows, plan.fed)
    for stage in plan.stages:
        if stage.rows is not None:
            yield stage.rows
        yield from (stage.spans.starts, stage.spans.lengths, stage.spans.seq_rows)


def _change(array: IntArray, before: IntArray | None) -> int | NDArray[np.int32]:
    if before is not None and array.shape == before.shape:
        difference = (array - before).reshape(-1)
        if not len(difference) or (difference == difference[0]).all():
            return int(difference[0]) if len(difference) else 0
    return array.astype(np.int32)


def _nothing_sampled() -> SamplingBatch:
    floats, ints = np.zeros(0, np.float32), np.zeros(0, np.int64)
    return SamplingBatch(floats, ints, floats, floats, ints, ints, floats, ints)


NOT_SAMPLED = _nothing_sampled()
NO_BLOCKS = np.zeros((3, 0), np.int32)
