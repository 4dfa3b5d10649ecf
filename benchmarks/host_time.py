"""What the host adds to a decode step: from a result in its hands to the next launch, with nothing on the device."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.engine.planner import Planner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.parallel import TensorParallel
from nanovllm.plan import StepPlan, StepResult

NUM_SEQS = 256
INPUT, OUTPUT = 100, 200        # tokens of each request: some of its steps take a new block


class StubbedRunner:
    """In a runner's place: answers every step at once, and notes how long the host took to come with the next."""

    def __init__(self, parallel: TensorParallel, num_seqs: int) -> None:
        self.parallel = parallel
        self.num_seqs = num_seqs
        self.answered: float | None = None      # when the last decode step of all sequences was
        self.seconds: list[float] = []

    def launch(self, plan: StepPlan) -> StepPlan:
        if self.answered is not None and len(plan.token_ids) == self.num_seqs:
            self.seconds.append(perf_counter() - self.answered)
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        num_rows = len(plan.logits_rows)
        result = StepResult(np.ones(num_rows, np.int64), np.ones(num_rows, np.bool_))
        self.answered = perf_counter() if len(plan.token_ids) == self.num_seqs else None
        return result

    def call(self) -> AbstractContextManager[bool]:
        return nullcontext(True)


def decode_host_ms(llm: LLM, num_seqs: int = NUM_SEQS) -> float:
    """Median milliseconds of `num_seqs` decoding at once (or as many as may run), by the engine as it stands.

    Scheduler and planner are others of the same options for the time it takes: no block of the engine's own is touched.
    """
    num_seqs, config = min(num_seqs, llm.config.max_num_seqs), llm.config
    runner = StubbedRunner(llm.runner.parallel, num_seqs)
    held = llm.scheduler, llm.planner, llm.runner
    llm.scheduler = Scheduler(config, num_blocks=num_seqs * (1 + (INPUT + OUTPUT) // config.kvcache_block_size))
    llm.planner = Planner(llm.scheduler.rows, config.kvcache_block_size, llm.planner.num_axes)
    llm.runner = runner  # type: ignore[assignment]
    try:
        prompts = [[seq % 100] * INPUT for seq in range(num_seqs)]
        llm.generate(prompts, SamplingParams(0.6, OUTPUT, ignore_eos=True), use_tqdm=False)
    finally:
        llm.scheduler, llm.planner, llm.runner = held
    return 1e3 * median(runner.seconds)
