"""A StepPlan's numbers as models and the sampler take them, in host memory: `staging.to_device` carries them over."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.contract import SpanBatch
from nanovllm.layers.sampler import LogprobRows, PenaltyRows, RandomRows, SamplingInputs, SeenResets
from nanovllm.models.layer_stage import FinalRows, LayerStage
from nanovllm.plan import IntArray, SamplingBatch, SpanTable, Stage, StepPlan

MAX_DRAWN_VALUES = 1 << 24      # logits that one group of random rows holds at most: bounds the sampler's memory


def host_tensor(array: IntArray | NDArray[Any]) -> Tensor:
    """An array as a tensor, of the same memory if that may be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


# ---------------------------------------------------------------- spans

def block_slots(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> IntArray:
    """Slots (block * block_size + offset) of rows [start, stop) of a block table: int64 [stop - start]."""
    first = start // block_size
    held = np.asarray(block_ids[first:-(-stop // block_size)], np.int64)
    slots = held[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[start - first * block_size:stop - first * block_size]


def span_slots(spans: SpanTable, block_size: int) -> IntArray:
    """Slots of all query tokens of the spans, in their order: int64 [tokens]."""
    span = np.repeat(np.arange(len(spans.lengths)), spans.lengths)               # [tokens] span of each token
    first_token = np.cumsum(spans.lengths) - spans.lengths
    rows = np.arange(len(span)) + (spans.starts - first_token)[span]             # [tokens] index in the sequence
    return spans.block_tables[span, rows // block_size].astype(np.int64) * block_size + rows % block_size


def span_batch(spans: SpanTable, block_size: int) -> SpanBatch:
    """The spans as attention takes them."""
    k_lens = spans.starts + spans.lengths
    return SpanBatch(
        cu_seqlens_q=host_tensor(np.concatenate(([0], np.cumsum(spans.lengths))).astype(np.int32)),
        seqlens_k=host_tensor(k_lens.astype(np.int32)),
        block_tables=host_tensor(spans.block_tables.astype(np.int32)),
        slot_mapping=host_tensor(span_slots(spans, block_size)),
        q_lens=tuple(spans.lengths.tolist()), k_lens=tuple(k_lens.tolist()),
        max_seqlen_q=int(spans.lengths.max(initial=0)), max_seqlen_k=int(k_lens.max(initial=0)))


def layer_stages(stages: Sequence[Stage], block_size: int) -> list[LayerStage]:
    return [LayerStage(stage.first_layer, None if stage.rows is None else host_tensor(stage.rows),
                       span_batch(stage.spans, block_size)) for stage in stages]


def row_spans(spans: SpanTable, rows: IntArray) -> SpanTable:
    """A span for each of some rows of `spans`: its one query, against all that it may see."""
    ends = np.cumsum(spans.lengths)
    span = np.searchsorted(ends, rows, side="right")        # [rows] the one that holds each row
    starts = rows - ends[span] + (spans.starts + spans.lengths)[span]
    return SpanTable(starts, np.ones_like(starts), spans.block_tables[span], spans.seq_rows[span])


def final_rows(plan: StepPlan, block_size: int) -> FinalRows | None:
    """The rows that want logits; None where there are none, since a model computes at least one."""
    if not len(plan.logits_rows):
        return None
    return FinalRows(host_tensor(plan.logits_rows),
                     span_batch(row_spans(plan.stages[-1].spans, plan.logits_rows), block_size))


# ---------------------------------------------------------------- sampling

def sampling_inputs(batch: SamplingBatch, resets: Sequence[tuple[int, IntArray]], vocab_size: int) -> SamplingInputs:
    """What the sampler needs to know (resets: `StepPlan.penalty_resets`); a pass that no row wants is None or empty."""
    return SamplingInputs(
        random=tuple(_random_rows(batch, rows, vocab_size) for rows in _random_groups(batch, vocab_size)),
        penalty=_penalty_rows(batch),
        resets=_seen_resets(resets),
        banned=host_tensor(np.array([(row, token) for row, ids in batch.banned for token in ids]).T)
        if any(ids for _, ids in batch.banned) else None,
        logprobs=_logprob_rows(batch))


def samples_plainly(batch: SamplingBatch, vocab_size: int) -> bool:
    """Whether no row wants more than its temperature and its random stream, or the argmax."""
    random = batch.top_k != 1
    filtered = ((batch.top_k > 0) & (batch.top_k < vocab_size)) | (batch.top_p < 1) | (batch.min_p > 0)
    return not (batch.banned or batch.num_logprobs or (random & filtered).any()
                or (batch.repetition_penalty != 1).any())


def _random_groups(batch: SamplingBatch, vocab_size: int) -> Iterator[IntArray]:
    """The rows that draw at random, those with equal needs together: no filter, top-k first, top-p alone."""
    limited = (batch.top_k > 0) & (batch.top_k < vocab_size)
    random, ranked = batch.top_k != 1, limited | (batch.top_p < 1)
    size = max(1, MAX_DRAWN_VALUES // vocab_size)
    for group in (random & ~ranked, random & limited, random & ranked & ~limited):
        rows = np.flatnonzero(group)
        yield from (rows[first:first + size] for first in range(0, len(rows), size))


def _random_rows(batch: SamplingBatch, rows: IntArray, vocab_size: int) -> RandomRows:
    def column(values: NDArray[Any]) -> Tensor:
        return host_tensor(values[rows, None])      # [n, 1]

    top_k = np.where(batch.top_k > 0, np.minimum(batch.top_k, vocab_size), vocab_size)
    log_min_p = np.log(batch.min_p, where=batch.min_p > 0, out=np.full(len(batch.min_p), -np.inf))
    ranked = bool((top_k[rows] < vocab_size).any() or (batch.top_p[rows] < 1).any())
    return RandomRows(
        rows=None if len(rows) == len(batch.top_k) else host_tensor(rows),
        temperature=column(batch.temperature.astype(np.float32)),
        keys=host_tensor(stream_keys(batch.seed[rows], batch.token_index[rows])),
        num_ranked=int(top_k[rows].max()) if ranked else 0,
        top_k=column(top_k) if ranked else None,
        top_p=column(batch.top_p.astype(np.float32)) if ranked else None,
        log_min_p=column(log_min_p.astype(np.float32)) if (batch.min_p[rows] > 0).any() else None)


def stream_keys(seed: IntArray, token_index: IntArray) -> NDArray[np.int32]:
    """Two 32-bit keys a row, [2, n, 1], for the noise of token `token_index` of the stream of `seed` (splitmix64)."""
    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    stream = mix(seed.astype(np.uint64) + golden)
    key = mix(stream + golden * (token_index.astype(np.uint64) + np.uint64(1)))
    halves = np.stack((key & np.uint64(0xFFFFFFFF), key >> np.uint64(32))).astype(np.uint32)
    return halves.view(np.int32)[:, :, None]


def _penalty_rows(batch: SamplingBatch) -> PenaltyRows | None:
    rows = np.flatnonzero(batch.repetition_penalty != 1)
    if not len(rows):
        return None
    return PenaltyRows(rows=host_tensor(rows), seq_rows=host_tensor(batch.seq_rows[rows]),
                       penalty=host_tensor(batch.repetition_penalty[rows, None].astype(np.float32)))


def _logprob_rows(batch: SamplingBatch) -> LogprobRows | None:
    counts = tuple((row, n) for row, n in enumerate(batch.num_logprobs) if n is not None)
    return LogprobRows(host_tensor(np.array([row for row, _ in counts])), counts) if counts else None


def _seen_resets(resets: Sequence[tuple[int, IntArray]]) -> SeenResets | None:
    if not resets:
        return None
    seq_rows = np.array([row for row, _ in resets], np.int64)
    ids = [np.asarray(ids, np.int64) for _, ids in resets]
    return SeenResets(seq_rows=host_tensor(seq_rows), token_ids=host_tensor(np.concatenate(ids)),
                      token_rows=host_tensor(np.repeat(seq_rows, [len(each) for each in ids])))
