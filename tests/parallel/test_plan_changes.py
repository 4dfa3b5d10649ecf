"""The plan that another rank puts together from what changed is the plan, whatever a scheduler does with its sequences;
and a step of decodes is told in a few numbers."""
from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize

from nanovllm.plan import StepPlan
from nanovllm.runner.plan_changes import NOT_SAMPLED, PlanMemory
from tests.engine.harness import Harness
from tests.engine.test_scheduler_machine import SchedulerMachine, pools

MAX_DECODE_BYTES = 1000         # of 256 decodes, where the plan as a whole has 21 kB


class Told:
    """Two memories, and a pickle between them."""

    def __init__(self) -> None:
        self.here, self.there = PlanMemory(), PlanMemory()
        self.sizes: list[int] = []

    def plan(self, plan: StepPlan) -> StepPlan:
        pickled = pickle.dumps(self.here.changes(plan), protocol=5)
        self.sizes.append(len(pickled))
        restored = self.there.restore(pickle.loads(pickled))
        assert_same(restored, replace(plan, sampling=NOT_SAMPLED, penalty_resets=()))
        return replace(restored, sampling=plan.sampling, penalty_resets=plan.penalty_resets)


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape and (left == right).all()
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_same(*pair)
    else:
        assert left == right


def told(engine: Harness) -> Told:
    """Has every plan of an engine go the way to another rank before it is carried out."""
    between, plan = Told(), engine.planner.plan
    engine.planner.plan = lambda step: between.plan(plan(step))       # type: ignore[method-assign]
    return between


class RankedMachine(SchedulerMachine):
    """Requests with and without pictures, preempted, aborted, failing, over prefix hits and reused rows, overlapped."""

    @initialize(options=pools)
    def start(self, options: dict[str, Any]) -> None:
        self.engine = Harness(**options)
        told(self.engine)


TestRankedMachine = RankedMachine.TestCase
TestRankedMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])


def test_a_step_of_256_decodes_is_told_in_a_few_numbers() -> None:
    engine = Harness(num_blocks=4096, block_size=4, overlap=True, max_num_seqs=256, max_num_batched_tokens=4096)
    between = told(engine)
    for index in range(256):
        engine.add([1, 2, 3, index % 30, index % 7], max_tokens=30, ignore_eos=True)
    for _ in range(25):
        engine.step()
    decodes = between.sizes[3:]
    assert len(decodes) > 15 and np.median(decodes) < MAX_DECODE_BYTES
