"""A step's arrays, worked out by hand: ids, positions, tables, stages, logits rows and sampling."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nanovllm.engine.planner import Planner
from nanovllm.engine.scheduled import take_rows, uncovered
from nanovllm.plan import StepPlan
from nanovllm.sampling_params import SamplingParams
from tests.engine.harness import Harness
from tests.engine.reference import EOS, Picture, make_sequence
from tests.engine.simulated_device import IMAGE_PAD

CAT = Picture(1, 10)


def plan(harness: Harness, num_axes: int = 3) -> StepPlan:
    """The plan of the next step, which is carried out as well."""
    seqs, _ = harness.scheduler.schedule()
    planned = Planner(harness.scheduler.rows, 4, num_axes).plan(harness.scheduler.in_flight[-1])
    harness._launch(harness.scheduler.in_flight[-1].is_prefill)
    harness._take_in()
    assert seqs
    return planned


def equal(array: Any, values: list[Any]) -> bool:
    return array.tolist() == values


# ---------------------------------------------------------------- rows of spans

@pytest.mark.parametrize("skips, parts", [
    ([], [(2, 10)]), ([(0, 2)], [(2, 10)]), ([(0, 3)], [(3, 10)]), ([(3, 5)], [(2, 3), (5, 10)]),
    ([(3, 5), (5, 7)], [(2, 3), (7, 10)]), ([(2, 10)], []), ([(8, 12)], [(2, 8)]), ([(12, 14)], [(2, 10)])])
def test_parts_that_nothing_covers(skips: list[tuple[int, int]], parts: list[tuple[int, int]]) -> None:
    assert uncovered(2, 10, skips) == parts


@pytest.mark.parametrize("room, spans, end", [
    (1, [(2, 3)], 3), (2, [(2, 4)], 6), (3, [(2, 4), (6, 7)], 7), (4, [(2, 4), (6, 8)], 9),
    (5, [(2, 4), (6, 8), (9, 10)], 10),
    (99, [(2, 4), (6, 8), (9, 10)], 10)])
def test_rows_within_a_budget_and_where_the_next_ones_begin(
        room: int, spans: list[tuple[int, int]], end: int) -> None:
    assert take_rows(2, 10, [(4, 6), (8, 9)], room) == (spans, end)


# ---------------------------------------------------------------- prompts and decodes

def test_prompt_then_decode() -> None:
    harness = Harness()
    seq = harness.add([5, 6, 7, 8, 9])
    first, second = plan(harness), plan(harness)
    assert equal(first.token_ids, [5, 6, 7, 8, 9]) and equal(first.positions, [[0, 1, 2, 3, 4]] * 3)
    spans = first.stages[0].spans
    assert equal(spans.starts, [0]) and equal(spans.lengths, [5]) and equal(spans.block_tables, [seq.block_table[:2]])
    assert equal(first.logits_rows, [4]) and len(first.stages) == 1 and first.stages[0].rows is None
    assert equal(second.token_ids, [seq.token_ids[5]]) and equal(second.positions, [[5]] * 3)
    assert equal(second.stages[0].spans.starts, [5]) and equal(second.logits_rows, [0])
    assert equal(first.sampling.token_index, [0]) and equal(second.sampling.token_index, [1])
    assert first.fed.shape == second.fed.shape == (2, 0)


def test_text_models_have_one_axis() -> None:
    harness = Harness()
    harness.add([5, 6, 7])
    assert equal(plan(harness, num_axes=1).positions, [[0, 1, 2]])


def test_decodes_stand_before_prompts_and_only_whole_sequences_sample() -> None:
    harness = Harness(max_num_batched_tokens=6)
    short, long = harness.add([1, 2, 3]), harness.add([4, 5, 6, 7, 8, 9, 10, 11])
    first, second, third = (plan(harness) for _ in range(3))
    assert equal(first.token_ids, [1, 2, 3, 4, 5, 6]) and equal(first.logits_rows, [2])
    assert equal(second.token_ids, [short.token_ids[3], 7, 8, 9, 10, 11]) and equal(second.logits_rows, [0, 5])
    assert equal(second.positions[0], [3, 3, 4, 5, 6, 7]) and equal(second.stages[0].spans.starts, [3, 3])
    assert equal(second.stages[0].spans.lengths, [1, 5])
    assert equal(third.sampling.token_index, [2, 1]) and equal(third.sampling.seq_rows, [short.row, long.row])


def test_positions_around_an_image_and_behind_the_prompt() -> None:
    """A grid of 1 x 10 merged rows; text goes on at start + 10."""
    harness = Harness()
    seq = harness.add([1, 2, CAT, 3])
    first, second = plan(harness), plan(harness)
    assert equal(first.positions[0], [0, 1, *[2] * 10, 12]) and equal(first.positions[1], [0, 1, *[2] * 10, 12])
    assert equal(first.positions[2], [0, 1, *range(2, 12), 12])
    assert equal(second.positions, [[13]] * 3) and seq.position_delta == 0
    assert equal(first.token_ids, [1, 2, *[IMAGE_PAD] * 10, 3])


def test_a_span_over_the_border_of_prompt_and_generated_tokens() -> None:
    """A resumed sequence computes both in one span."""
    harness = Harness(enable_prefix_caching=False)
    video = Picture(2, 2, interval=0.5, frames=5)             # t = 0, 0, 1, 1, 2; text goes on at start + 3
    seq = harness.add([1, 2, video, 3], max_tokens=6)
    for _ in range(3):
        plan(harness)
    harness.scheduler.requeue(seq)
    resumed = plan(harness)
    t = [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 7, 8]
    assert seq.position_delta == -7 and equal(resumed.positions[0], t)
    assert equal(resumed.token_ids, seq.token_ids[:16]) and equal(resumed.sampling.token_index, [3])
    assert equal(plan(harness).positions, [[9]] * 3)


def test_an_id_that_only_the_device_knows_is_fed_from_its_batch_row() -> None:
    harness = Harness(overlap=True)
    seq, other = harness.add([1, 2, 3]), harness.add([4, 5])
    harness.step()
    harness.scheduler.schedule()
    planned = harness.planner.plan(harness.scheduler.in_flight[-1])
    assert equal(planned.fed, [[0, 1], [seq.row, other.row]]) and len(planned.token_ids) == 2
    assert equal(planned.positions[0], [3, 2]) and equal(planned.sampling.token_index, [1, 1])
    harness.scheduler.abandon_steps()


# ---------------------------------------------------------------- stages

def test_each_ratio_of_a_list_has_a_stage_that_keeps_fewer_rows() -> None:
    harness = Harness(recompute_ratio=[1.0, 0.5, 0.0], enable_prefix_caching=False)
    harness.generate([1, CAT, 2], max_tokens=1)
    harness.add([7, 8, 9, CAT, 4, 5], max_tokens=1)
    harness.add([1, 2], max_tokens=1)
    planned = plan(harness)
    assert [stage.first_layer for stage in planned.stages] == [0, 1, 2]
    whole, half, none = planned.stages
    assert whole.rows is None and equal(whole.spans.starts, [0, 0]) and equal(whole.spans.lengths, [15, 2])
    assert half.rows is not None and equal(half.rows, [*range(8), 13, 14, 15, 16])
    assert equal(half.spans.starts, [0, 13, 0]) and equal(half.spans.lengths, [8, 2, 2])
    assert none.rows is not None and equal(none.rows, [0, 1, 2, 8, 9, 10, 11])       # of the rows of the stage before
    assert equal(none.spans.starts, [0, 13, 0]) and equal(none.spans.lengths, [3, 2, 2])
    assert equal(planned.logits_rows, [4, 6])
    copy, = planned.copies
    assert copy.first_rows == (10, 5, 0) and (copy.target_start, copy.num_tokens, copy.delta) == (3, 10, 2)


def test_a_chunk_may_run_out_of_rows_in_a_later_stage() -> None:
    harness = Harness(recompute_ratio=[1.0, 0.0, 0.0], enable_prefix_caching=False, max_num_batched_tokens=4)
    harness.generate([1, CAT, 2], max_tokens=1)
    harness.add([CAT, 4], max_tokens=1)
    first, second, third = (plan(harness) for _ in range(3))
    for planned in (first, second):
        stage = planned.stages[1]
        assert stage.rows is not None and len(stage.rows) == 0 and len(stage.spans.lengths) == 0
        assert len(planned.logits_rows) == 0 and planned.logits_rows.dtype == np.int64
    assert equal(third.logits_rows, [0]) and third.copies == ()


def test_two_lists_in_one_step_share_stages() -> None:
    harness = Harness(enable_prefix_caching=False)
    harness.generate([1, CAT, 2], max_tokens=1)
    harness.add([CAT, 4], max_tokens=1, recompute_ratio=[0.5, 0.5, 0.0])
    harness.add([3, CAT, 4], max_tokens=1, recompute_ratio=[0.5, 0.2, 0.2])
    planned = plan(harness)
    lengths = [stage.spans.lengths.tolist() for stage in planned.stages]
    assert lengths == [[5, 1, 6, 1], [5, 1, 3, 1], [1, 3, 1]]
    assert equal(planned.logits_rows, [0, 4])


def test_one_span_more_for_each_reused_image() -> None:
    harness = Harness(recompute_ratio=0.2, enable_prefix_caching=False)
    parts: list[int | Picture] = [1, CAT, 2, Picture(2, 10), 3, Picture(3, 10)]
    harness.generate(parts, max_tokens=1)
    harness.add([9, *parts, 4], max_tokens=1)
    spans = plan(harness).stages[0].spans
    assert equal(spans.starts, [0, 12, 23, 34]) and equal(spans.lengths, [4, 3, 3, 1])


# ---------------------------------------------------------------- sampling

def test_sampling_params_of_each_row() -> None:
    harness = Harness()
    harness.scheduler.add(make_sequence([1, 2], SamplingParams(0.5, top_k=3, top_p=0.9, min_p=0.1, seed=11)))
    harness.scheduler.add(make_sequence([3], SamplingParams(2.0, repetition_penalty=1.5, logprobs=2, seed=12)))
    harness.scheduler.schedule()
    step = harness.scheduler.in_flight[-1]
    planned = harness.planner.plan(step)
    s = planned.sampling
    assert equal(s.temperature, [0.5, 2.0]) and equal(s.top_k, [3, 0]) and s.top_p.tolist() == pytest.approx([0.9, 1.0])
    assert s.min_p.tolist() == pytest.approx([0.1, 0.0]) and equal(s.seed, [11, 12])
    assert s.repetition_penalty.tolist() == [1.0, 1.5] and s.num_logprobs == (None, 2) and s.banned == ()
    row, ids = planned.penalty_resets[0]
    assert len(planned.penalty_resets) == 1 and row == step.seqs[1].row and equal(ids, [3])
    harness.scheduler.postprocess(step.seqs, [0, 0])
    harness.scheduler.schedule()
    assert harness.planner.plan(harness.scheduler.in_flight[-1]).penalty_resets == ()


def test_stop_ids_are_banned_before_min_tokens() -> None:
    harness = Harness()
    harness.add([1, 2], min_tokens=2, ignore_eos=False, stop_token_ids=[3])
    harness.add([4])
    banned = [plan(harness).sampling.banned for _ in range(3)]
    assert [[(i, sorted(ids)) for i, ids in rows] for rows in banned] == [[(0, [3, EOS])], [(0, [3, EOS])], []]


def test_a_penalty_starts_anew_where_kv_does() -> None:
    harness = Harness()
    seq = harness.add([1, 2], repetition_penalty=1.5, max_tokens=9)
    plan(harness)
    assert plan(harness).penalty_resets == ()
    harness.scheduler.requeue(seq)
    (row, ids), = plan(harness).penalty_resets
    assert row == seq.row and ids.tolist() == seq.token_ids[:4]
    harness.fail_step()
    (row, ids), = plan(harness).penalty_resets           # the device has counted a token that was dropped
    assert row == seq.row and ids.tolist() == seq.token_ids[:5]
