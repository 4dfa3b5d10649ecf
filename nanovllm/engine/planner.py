"""Turns a scheduled step into the arrays of a `StepPlan`."""
from __future__ import annotations

import numpy as np

from nanovllm.engine.batch_rows import BatchRows
from nanovllm.engine.scheduled import ScheduledSeq, ScheduledStep, uncovered
from nanovllm.engine.sequence import Range, Sequence
from nanovllm.plan import IntArray, SamplingBatch, SpanTable, Stage, StepPlan

Rows = list[tuple[ScheduledSeq, Range]]       # the spans of a step, in order


class Planner:
    def __init__(self, rows: BatchRows, block_size: int, num_axes: int) -> None:
        self.rows = rows
        self.block_size = block_size
        self.num_axes = num_axes              # of a rotary position: 1, or 3 for M-RoPE

    def plan(self, step: ScheduledStep) -> StepPlan:
        spans: Rows = [(entry, span) for entry in step.entries for span in entry.spans]
        for entry in step.entries:
            self.rows.sync_blocks(entry.seq)
        stages = self._stages(step, spans)
        token_ids, fed = _token_ids(spans, step.num_tokens)
        return StepPlan(
            token_ids=token_ids, fed=fed, positions=self._positions(spans), stages=stages,
            logits_rows=_logits_rows(spans if len(stages) == 1 else _spans_at(spans, stages[-1].first_layer)),
            sampling=self._sampling([entry for entry in step.entries if entry.samples]),
            encodes=tuple(step.encodes), image_rows=tuple(step.image_rows), copies=tuple(step.copies),
            penalty_resets=tuple((entry.seq.row, np.asarray(entry.seq.token_ids, np.int64)) for entry in step.entries
                                 if entry.resets_row and entry.seq.sampling_params.repetition_penalty != 1.0))

    def _positions(self, spans: Rows) -> IntArray:
        """Rotary positions [axes, tokens]."""
        parts = [_positions_of(entry.seq, start, stop, self.num_axes) for entry, (start, stop) in spans]
        return np.concatenate(parts, axis=1)

    def _stages(self, step: ScheduledStep, spans: Rows) -> tuple[Stage, ...]:
        """One stage for all layers, and one more from each layer on where a per-layer ratio lets rows go."""
        stages = [Stage(0, None, self._table(spans))]
        layers = sorted({layer for entry in step.entries if entry.seq.reuse for layer in entry.seq.reuse.first_layers})
        for layer in layers[1:]:
            kept = _spans_at(spans, layer)
            stages.append(Stage(layer, _rows_within(_spans_at(spans, layers[layers.index(layer) - 1]), kept),
                                self._table(kept)))
        return tuple(stages)

    def _table(self, spans: Rows) -> SpanTable:
        starts = np.array([start for _, (start, _) in spans], np.int64)
        stops = np.array([stop for _, (_, stop) in spans], np.int64)
        rows = np.array([entry.seq.row for entry, _ in spans], np.int64)
        width = -(-int(stops.max(initial=0)) // self.block_size)
        return SpanTable(starts, stops - starts, self.rows.tables(rows, width))

    def _sampling(self, entries: list[ScheduledSeq]) -> SamplingBatch:
        held, rows = self.rows, np.array([entry.seq.row for entry in entries], np.int64)
        num_logprobs = tuple(entry.seq.sampling_params.logprobs for entry in entries)
        return SamplingBatch(
            temperature=held.temperature[rows], top_k=held.top_k[rows], top_p=held.top_p[rows],
            min_p=held.min_p[rows], seed=held.seed[rows],
            token_index=np.array([entry.token_index for entry in entries], np.int64),
            repetition_penalty=held.repetition_penalty[rows], seq_rows=rows,
            banned=tuple((i, tuple(entry.seq.stop_ids)) for i, entry in enumerate(entries)
                         if entry.token_index < entry.seq.sampling_params.min_tokens),
            num_logprobs=() if all(n is None for n in num_logprobs) else num_logprobs)


def _token_ids(spans: Rows, num_tokens: int) -> tuple[IntArray, IntArray]:
    """Ids of all query tokens, and [2, n] (token of the step, batch row) for those the device alone knows so far."""
    ids = np.zeros(num_tokens, np.int64)
    fed, filled = [], 0
    for entry, (start, stop) in spans:
        known = entry.seq.token_ids
        if stop - start > 1:
            ids[filled:filled + stop - start] = known[start:stop]
        elif start < len(known):
            ids[filled] = known[start]
        else:
            fed.append((filled, entry.seq.row))
        filled += stop - start
    return ids, np.array(fed, np.int64).reshape(-1, 2).T


def _positions_of(seq: Sequence, start: int, stop: int, num_axes: int) -> IntArray:
    """Positions [axes, stop - start]: the prompt's own, then token index plus the sequence's constant."""
    index = np.arange(start, stop)
    if seq.positions is None:
        return np.broadcast_to(index, (num_axes, stop - start))
    cut = min(max(seq.num_prompt_tokens, start), stop)
    behind = np.broadcast_to(index[cut - start:] + seq.position_delta, (num_axes, stop - cut))
    return np.concatenate([seq.positions[:, start:cut], behind], axis=1)


def _logits_rows(spans: Rows) -> IntArray:
    """Index of the last row of each sequence that samples."""
    ends = np.cumsum([stop - start for _, (start, stop) in spans])
    wanted = [i for i, (entry, (_, stop)) in enumerate(spans) if entry.samples and stop == entry.end]
    return ends[wanted].astype(np.int64) - 1


def _spans_at(spans: Rows, layer: int) -> Rows:
    """The spans without the rows that their sequences' ratios leave to reused KV at a layer."""
    kept = []
    for entry, (start, stop) in spans:
        reuse = entry.seq.reuse
        skips = reuse.skips(reuse.tier_at(layer)) if reuse else []
        kept += [(entry, part) for part in uncovered(start, stop, skips)]
    return kept


def _rows_within(outer: Rows, inner: Rows) -> IntArray:
    """Indices, among the rows of `outer`, of the rows of `inner`; each inner span lies in one outer span, in order."""
    rows, offset, i = [], 0, 0
    for entry, (start, stop) in outer:
        while i < len(inner) and inner[i][0] is entry and inner[i][1][1] <= stop:
            a, b = inner[i][1]
            rows.append(np.arange(offset + a - start, offset + b - start))
            i += 1
        offset += stop - start
    assert i == len(inner)
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)
