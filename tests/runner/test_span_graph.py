"""Which numbers of tokens have a graph, and what a graph's inputs hold behind a plan's own spans."""
from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch

from nanovllm.runner.span_graph import MAX_SPANS, SpanInputs, bucket_sizes
from nanovllm.runner.staging import packed_bytes, packed_views
from tests.engine.step_plans import Sequences, random_ids


def test_few_rows_fill_a_step_up():
    sizes = bucket_sizes(4096)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 2048
    for tokens in range(1, 2049):
        padding = sizes[bisect_left(sizes, tokens)] - tokens
        assert padding < max(16, min(128, tokens))
    assert bucket_sizes(100) == [16, 32, 64] and bucket_sizes(8) == []


def test_what_lies_behind_a_plan_belongs_to_no_span_and_writes_nowhere():
    """The buffer still holds a larger plan."""
    shapes = SpanInputs.shapes(16, 1, 20)
    inputs = SpanInputs(*packed_views(torch.full((packed_bytes(shapes),), 77, dtype=torch.uint8), shapes))
    sequences = Sequences(random_ids([9, 40]))
    plan = sequences.plan([(0, 2, 5), (1, 30, 34)], rows=[2, 5])        # the second but last of the other span
    inputs.fill(plan, block_size=16)
    assert inputs.cu_seqlens_q.tolist() == [0, 3] + [7] * (MAX_SPANS - 1)
    assert inputs.seqlens_k.tolist() == [5, 34] + [1] * (MAX_SPANS - 2)
    assert (inputs.slot_mapping[:7] >= 0).all() and (inputs.slot_mapping[7:] == -1).all()
    assert np.array_equal(inputs.positions[:, :7], plan.positions) and not inputs.positions[:, 7:].any()
    width = plan.stages[0].spans.block_tables.shape[1]
    assert np.array_equal(inputs.block_tables[:2, :width], plan.stages[0].spans.block_tables)
    assert not inputs.block_tables[:2, width:].any() and not inputs.block_tables[2:].any()
    assert inputs.final_rows.tolist() == [2, 5] + [0] * (MAX_SPANS - 2)
    assert inputs.final_seqlens.tolist() == [5, 33] + [1] * (MAX_SPANS - 2)
    assert torch.equal(inputs.final_tables, inputs.block_tables)
    assert inputs.final(16).spans.q_lens == (1,) * MAX_SPANS
