"""A device in plain Python whose KV slots hold hashes of what was attended to, so that any wrong slot shows."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nanovllm.plan import KVCopy, SpanTable, Stage, StepPlan

NUM_TEXT_IDS = 40
IMAGE_PAD, VIDEO_PAD = 100, 101
Position = tuple[int, ...]


class Row(NamedTuple):
    """KV of one token in one layer."""

    content: int            # what a key and a value hold, but for the rotation
    position: Position      # the rotation of the key
    token: int              # embedding of the token it belongs to
    is_copy: bool           # filled by a KV copy, not computed


def embed_text(token_id: int) -> int:
    return hash((1, token_id))


def embed_image_row(pixels: int, row: int) -> int:
    return hash((2, pixels, row))


def kv_content(layer: int, hidden: int) -> int:
    return hash((3, layer, hidden))


def see(seen: int, content: int, position: Position) -> int:
    """The sum over one more token of what attention sees; keys at another position look different."""
    return hash((seen, content, position))


def next_hidden(hidden: int, seen: int) -> int:
    return hash((4, hidden, seen))


def draw(hidden: int, banned: Iterable[int] = ()) -> int:
    """The next token id; one that is not banned."""
    token_id = hidden % NUM_TEXT_IDS
    while token_id in banned:
        token_id = (token_id + 1) % NUM_TEXT_IDS
    return token_id


class Device:
    """Carries out `StepPlan`s on a pool of KV blocks and a cache of encoder rows."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, rows_per_encoder_block: int) -> None:
        self.block_size = block_size
        self.num_layers = num_layers
        self.kv: list[dict[int, Row]] = [{} for _ in range(num_layers)]      # by slot; absent: never written
        self.rows_per_encoder_block = rows_per_encoder_block
        self.encoder_rows: dict[tuple[int, int], int] = {}                   # (block, row in it) -> embedding
        self.last_ids: dict[int, int] = {}                                   # by batch row
        self.num_encoded: dict[Hashable, int] = {}                           # encoder calls by image key
        self.num_computed = 0                                                # rows that went through layer 0
        self.num_copied = 0

    def slot(self, block_table: Any, index: int) -> int:
        block_id = int(block_table[index // self.block_size])
        assert block_id >= 0, "a block that is not held"
        return block_id * self.block_size + index % self.block_size

    # ------------------------------------------------------------ a step

    def execute(self, plan: StepPlan) -> list[int]:
        """The ids drawn for `logits_rows`."""
        self._copy(plan.copies)
        hidden = tokens = self._embeddings(plan)
        positions = [tuple(axes) for axes in plan.positions.T.tolist()]
        assert len(positions) == len(tokens) == len(plan.token_ids)
        self.num_computed += len(tokens)
        for stage, layers in self._stages(plan):
            if stage.rows is not None:
                assert np.all(np.diff(stage.rows) > 0)
                hidden, tokens, positions = ([values[i] for i in stage.rows] for values in (hidden, tokens, positions))
            for layer in layers:
                self._store(layer, hidden, tokens, positions, stage.spans)
                hidden = self._attend(layer, hidden, stage.spans)
        banned = dict(plan.sampling.banned)
        ids = [draw(hidden[row], banned.get(i, ())) for i, row in enumerate(plan.logits_rows)]
        assert len(ids) == len(plan.sampling.seq_rows)
        self.last_ids.update(zip(plan.sampling.seq_rows.tolist(), ids))
        return ids

    def spoil(self, plan: StepPlan) -> None:
        """What a step that fails half-way may leave behind: nothing it would have written can be relied on."""
        for stage, layers in self._stages(plan):
            for layer in layers:
                copied = [self.slot(copy.target_blocks, copy.target_start + index)
                          for copy in plan.copies for index in self._copied_rows(copy, layer)]
                for slot in [*copied, *self._span_slots(stage.spans)]:
                    self.kv[layer].pop(slot, None)
        for encode in plan.encodes:
            for block_id in encode.block_ids or ():
                for row in range(self.rows_per_encoder_block):
                    self.encoder_rows.pop((block_id, row), None)

    # ------------------------------------------------------------ its parts

    def _stages(self, plan: StepPlan) -> Iterator[tuple[Stage, range]]:
        """Each stage with its layers."""
        firsts = [stage.first_layer for stage in plan.stages]
        assert firsts[0] == 0 and firsts == sorted(set(firsts))
        for stage, (first, stop) in zip(plan.stages, pairwise([*firsts, self.num_layers])):
            yield stage, range(first, stop)

    def _copied_rows(self, copy: KVCopy, layer: int) -> range:
        first_rows = copy.first_rows if len(copy.first_rows) > 1 else copy.first_rows * self.num_layers
        return range(first_rows[layer], copy.num_tokens)

    def _copy(self, copies: tuple[KVCopy, ...]) -> None:
        """All copies read what was there before the step, in whatever order they are done."""
        for layer, rows in enumerate(self.kv):
            written: dict[int, Row] = {}
            for copy in copies:
                for index in self._copied_rows(copy, layer):
                    source = rows[self.slot(copy.source_blocks, copy.source_start + index)]
                    assert not source.is_copy, "a reused row is the source of another reuse"
                    target = self.slot(copy.target_blocks, copy.target_start + index)
                    assert target not in written
                    written[target] = source._replace(
                        position=tuple(axis + copy.delta for axis in source.position), is_copy=True)
                    self.num_copied += layer == 0
            rows.update(written)

    def _embeddings(self, plan: StepPlan) -> list[int]:
        ids = plan.token_ids.copy()
        for target, row in plan.fed.T.tolist():
            ids[target] = self.last_ids[row]
        embeddings: list[int | None] = [None if i in (IMAGE_PAD, VIDEO_PAD) else embed_text(i) for i in ids.tolist()]
        uncached = self._encode(plan)
        for rows in plan.image_rows:
            for row in range(rows.first, rows.stop):
                target = rows.target + row - rows.first
                assert embeddings[target] is None, "image rows where there is no placeholder, or twice"
                block, offset = divmod(row, self.rows_per_encoder_block)
                embeddings[target] = (embed_image_row(uncached[rows.key], row) if rows.block_ids is None
                                      else self.encoder_rows[rows.block_ids[block], offset])
        assert None not in embeddings, "a placeholder without its image row"
        return [embedding for embedding in embeddings if embedding is not None]

    def _encode(self, plan: StepPlan) -> dict[Hashable, int]:
        """Pixels of the images that are encoded for this step alone."""
        uncached = {}
        for encode in plan.encodes:
            assert encode.pixels is not None, f"no pixels to encode {encode.key}"
            self.num_encoded[encode.key] = self.num_encoded.get(encode.key, 0) + 1
            if encode.block_ids is None:
                uncached[encode.key] = encode.pixels
            else:
                t, h, w = encode.grid
                for row in range(t * h * w // 4):
                    block, offset = divmod(row, self.rows_per_encoder_block)
                    self.encoder_rows[encode.block_ids[block], offset] = embed_image_row(encode.pixels, row)
        return uncached

    def _spans(self, spans: SpanTable) -> Iterator[tuple[int, int, Any]]:
        for start, length, table in zip(spans.starts.tolist(), spans.lengths.tolist(), spans.block_tables):
            assert length > 0, "a span without query tokens"
            yield start, start + length, table

    def _span_slots(self, spans: SpanTable) -> list[int]:
        return [self.slot(table, i) for start, stop, table in self._spans(spans) for i in range(start, stop)]

    def _store(self, layer: int, hidden: list[int], tokens: list[int], positions: list[Position],
               spans: SpanTable) -> None:
        slots = self._span_slots(spans)
        assert len(set(slots)) == len(slots) == len(hidden), "two tokens in one slot"
        for slot, h, token, position in zip(slots, hidden, tokens, positions):
            self.kv[layer][slot] = Row(kv_content(layer, h), position, token, is_copy=False)

    def _attend(self, layer: int, hidden: list[int], spans: SpanTable) -> list[int]:
        out: list[int] = []
        for start, stop, table in self._spans(spans):
            seen = 0
            for index in range(stop):
                row = self.kv[layer][self.slot(table, index)]
                seen = see(seen, row.content, row.position)
                if index >= start:
                    out.append(next_hidden(hidden[len(out)], seen))
        return out
