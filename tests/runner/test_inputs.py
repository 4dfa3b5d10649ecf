"""Slots and span lengths against plain loops over tokens."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanovllm.plan import SpanTable, Stage
from nanovllm.runner.inputs import block_slots, host_tensor, layer_stages, row_spans, span_batch


def test_slots_of_a_block_table():
    assert block_slots([7, 2, 5], 3, 10, 4).tolist() == [31, 8, 9, 10, 11, 20, 21]
    assert block_slots((7,), 2, 2, 4).tolist() == []


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_span_batch_equals_a_loop_over_tokens(block_size):
    rng = random.Random(block_size)
    spans = [(rng.randrange(40), rng.choice([1, 1, rng.randint(1, 30)])) for _ in range(12)]
    tables = [[rng.randrange(100) for _ in range(70 // block_size + 1)] for _ in spans]
    starts, lengths = (np.array(column, np.int64) for column in zip(*spans))
    batch = span_batch(SpanTable(starts, lengths, np.array(tables, np.int32), np.arange(12)), block_size)
    slots = [table[token // block_size] * block_size + token % block_size
             for (start, length), table in zip(spans, tables) for token in range(start, start + length)]
    assert batch.slot_mapping.tolist() == slots
    assert batch.slot_mapping.dtype == torch.int64
    assert batch.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(spans) + 1)]
    assert batch.seqlens_k.tolist() == [start + length for start, length in spans] == list(batch.k_lens)
    assert batch.q_lens == tuple(length for _, length in spans)
    assert (batch.max_seqlen_q, batch.max_seqlen_k) == (max(lengths), max(starts + lengths))
    assert batch.block_tables.tolist() == tables
    assert {batch.cu_seqlens_q.dtype, batch.seqlens_k.dtype, batch.block_tables.dtype} == {torch.int32}


def test_a_row_sees_what_it_saw_in_its_span():
    tables = np.arange(6, dtype=np.int32).reshape(3, 2)
    spans = SpanTable(np.array([3, 0, 9]), np.array([2, 4, 1]), tables, np.arange(3))
    rows = row_spans(spans, np.array([6, 1, 2, 5]))
    assert rows.starts.tolist() == [9, 4, 0, 3] and rows.lengths.tolist() == [1] * 4
    assert rows.block_tables.tolist() == [[4, 5], [0, 1], [2, 3], [2, 3]]
    assert rows.seq_rows.tolist() == [2, 0, 1, 1]
    assert len(row_spans(spans, np.empty(0, np.int64)).starts) == 0


def test_stages_keep_their_rows_and_may_be_empty():
    table = np.zeros((1, 2), np.int32)
    no_ints = np.empty(0, np.int64)
    none = SpanTable(no_ints, no_ints, np.empty((0, 2), np.int32), no_ints)
    first, second = layer_stages([Stage(0, None, SpanTable(np.array([3]), np.array([2]), table, np.array([0]))),
                                  Stage(2, no_ints, none)], 4)
    assert first.rows is None and (first.first_layer, second.first_layer) == (0, 2)
    assert second.rows is not None and second.rows.shape == (0,)
    assert second.spans.q_lens == () and second.spans.cu_seqlens_q.tolist() == [0]


def test_a_read_only_array_is_copied_and_no_other():
    array = np.arange(3)
    assert host_tensor(array).data_ptr() == array.ctypes.data
    tensor = host_tensor(np.broadcast_to(array, (2, 3)))
    tensor += 1
    assert array.tolist() == [0, 1, 2] and tensor.tolist() == [[1, 2, 3]] * 2
