"""StepPlans of random prompts, and the check of their results against dense logits."""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.plan import IntArray, SamplingBatch, SpanTable, Stage, StepPlan, StepResult

BLOCK = 16
NUM_BLOCKS = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Span = tuple[int, int, int]         # sequence, first token, token behind the last


def make_runner(path: Any, **options: Any) -> ModelRunner:
    """A runner with small blocks, whose KV is NaN until it is written."""
    config = Config(str(path), num_kvcache_blocks=NUM_BLOCKS, **dict(device="cpu") | options)
    object.__setattr__(config, "kvcache_block_size", BLOCK)         # the public option is a multiple of 256
    runner = ModelRunner(config)
    runner.kv_cache.fill_(float("nan"))
    return runner


class Sequences:
    """Prompts with block tables in random order and rotary positions [axes, tokens]."""

    def __init__(self, ids: Sequence[Sequence[int]], positions: Sequence[IntArray] | None = None) -> None:
        free = random.Random(len(ids)).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.ids = [np.asarray(each, np.int64) for each in ids]
        self.positions = positions or [np.arange(len(each))[None] for each in ids]
        self.tables = [[free.pop() for _ in range(-(-len(each) // BLOCK))] for each in ids]

    def table(self, spans: Sequence[Span]) -> SpanTable:
        width = max(len(self.tables[seq]) for seq, _, _ in spans)
        tables = [self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq, _, _ in spans]
        starts, stops = (np.array([span[i] for span in spans], np.int64) for i in (1, 2))
        return SpanTable(starts, stops - starts, np.array(tables, np.int32), np.array([seq for seq, _, _ in spans]))

    def plan(self, spans: Sequence[Span], later: Sequence[Stage] = (), rows: Any = None, **given: Any) -> StepPlan:
        """Greedy, with all logprobs, of the last row of every span (or of `rows` of the last stage)."""
        if rows is None:
            rows = np.cumsum([stop - start for _, start, stop in spans]) - 1
        return StepPlan(
            token_ids=np.concatenate([self.ids[seq][start:stop] for seq, start, stop in spans]),
            positions=np.concatenate([self.positions[seq][:, start:stop] for seq, start, stop in spans], axis=1),
            stages=(Stage(0, None, self.table(spans)), *later), logits_rows=np.asarray(rows, np.int64),
            sampling=greedy(len(rows)), **given)


def greedy(num_rows: int) -> SamplingBatch:
    floats, ints = np.ones(num_rows, np.float32), np.zeros(num_rows, np.int64)
    return SamplingBatch(temperature=floats, top_k=ints + 1, top_p=floats, min_p=0 * floats, seed=ints,
                         token_index=ints, repetition_penalty=floats, seq_rows=np.arange(num_rows),
                         num_logprobs=(-1,) * num_rows)


def check(result: StepResult, row: int, logits: Tensor) -> None:
    """The row's id is the argmax of `logits` [vocab], and its logprobs are theirs."""
    assert result.finite[row] and result.logprobs is not None and result.logprobs[row] is not None
    ours = torch.tensor([result.logprobs[row][i] for i in range(len(logits))])
    assert (ours - logits.log_softmax(-1)).abs().max() < 1e-4
    assert result.token_ids[row] == logits.argmax()


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]
