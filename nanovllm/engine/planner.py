"""Turns a scheduled step into the arrays of a `StepPlan`."""
from __future__ import annotations

import numpy as np

from nanovllm.engine.batch_rows import BatchRows
from nanovllm.engine.scheduled import ScheduledSeq, ScheduledStep, uncovered
from nanovllm.engine.sequence import Range
from nanovllm.plan import IntArray, SamplingBatch, SpanTable, Stage, StepPlan

Rows = list[tuple[ScheduledSeq, Range]]       # the spans of a step, in order


class Planner:
    """Visits each span once for its numbers; all else is done on whole arrays, so a large decode batch costs little."""

    def __init__(self, rows: BatchRows, block_size: int, num_axes: int) -> None:
        self.rows = rows
        self.block_size = block_size
        self.num_axes = num_axes              # of a rotary position: 1, or 3 for M-RoPE

    def plan(self, step: ScheduledStep) -> StepPlan:
        spans: Rows = [(entry, span) for entry in step.entries for span in entry.spans]
        stages = self._stages(step, spans)
        token_ids, fed = _token_ids(spans, step.num_tokens)
        return StepPlan(
            token_ids=token_ids, fed=fed, positions=self._positions(spans, stages[0].spans), stages=stages,
            logits_rows=_logits_rows(spans if len(stages) == 1 else _spans_at(spans, stages[-1].first_layer)),
            sampling=self._sampling([entry for entry in step.entries if entry.samples]),
            encodes=tuple(step.encodes), image_rows=tuple(step.image_rows), copies=tuple(step.copies),
            penalty_resets=tuple((entry.seq.row, np.asarray(entry.seq.token_ids, np.int64)) for entry in step.entries
                                 if entry.resets_row and entry.seq.sampling_params.repetition_penalty != 1.0))

    def _positions(self, spans: Rows, table: SpanTable) -> IntArray:
        """Rotary positions [axes, tokens]: behind a prompt token index plus a constant, in it what was worked out."""
        ends = np.cumsum(table.lengths)
        index = np.arange(ends[-1]) + np.repeat(table.starts - ends + table.lengths, table.lengths)
        delta = self.rows.position_delta[[entry.seq.row for entry, _ in spans]]
        positions = np.repeat((index + np.repeat(delta, table.lengths))[None], self.num_axes, axis=0)
        for (entry, (start, stop)), end in zip(spans, ends.tolist()):
            seq = entry.seq
            if start < seq.num_prompt_tokens:
                first, inside = end - (stop - start), min(stop, seq.num_prompt_tokens)
                own = np.arange(start, inside) if seq.positions is None else seq.positions[:, start:inside]
                positions[:, first:first + inside - start] = own
        return positions

    def _stages(self, step: ScheduledStep, spans: Rows) -> tuple[Stage, ...]:
        """One stage for all layers, and one more from each layer on where a per-layer ratio lets rows go."""
        stages = [Stage(0, None, self._table(spans))]
        layers = sorted({layer for entry in step.entries if entry.seq.reuse for layer in entry.seq.reuse.first_layers})
        outer = spans
        for layer in layers[1:]:
            kept = _spans_at(spans, layer)
            stages.append(Stage(layer, _rows_within(outer, kept), self._table(kept)))
            outer = kept
        return tuple(stages)

    def _table(self, spans: Rows) -> SpanTable:
        starts = np.array([start for _, (start, _) in spans], np.int64)
        stops = np.array([stop for _, (_, stop) in spans], np.int64)
        rows = np.array([entry.seq.row for entry, _ in spans], np.int64)
        width = -(-int(stops.max(initial=0)) // self.block_size)
        return SpanTable(starts, stops - starts, self.rows.tables(rows, width), rows)

    def _sampling(self, entries: list[ScheduledSeq]) -> SamplingBatch:
        held, rows = self.rows, np.array([entry.seq.row for entry in entries], np.int64)
        token_index = np.array([entry.token_index for entry in entries], np.int64)
        early = np.flatnonzero(token_index < held.min_tokens[rows]).tolist()
        return SamplingBatch(
            temperature=held.temperature[rows], top_k=held.top_k[rows], top_p=held.top_p[rows],
            min_p=held.min_p[rows], seed=held.seed[rows], token_index=token_index,
            repetition_penalty=held.repetition_penalty[rows], seq_rows=rows,
            banned=tuple((i, tuple(entries[i].seq.stop_ids)) for i in early),
            num_logprobs=tuple(entry.seq.sampling_params.logprobs for entry in entries)
            if held.wants_logprobs[rows].any() else ())


def _token_ids(spans: Rows, num_tokens: int) -> tuple[IntArray, IntArray]:
    """Ids of all query tokens, and [2, n] (token of the step, batch row) for those the device alone knows so far."""
    ids: list[int] = []
    fed: list[tuple[int, int]] = []
    for entry, (start, stop) in spans:
        known = entry.seq.token_ids
        if start < len(known):
            ids += known[start:stop]
        else:
            fed.append((len(ids), entry.seq.row))
            ids.append(0)
    assert len(ids) == num_tokens
    return np.array(ids, np.int64), np.array(fed, np.int64).reshape(-1, 2).T


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
