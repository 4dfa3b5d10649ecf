"""The runner of an engine, alone or as the first of several ranks that work in step with it."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner, StepInFlight, pick_device
from nanovllm.plan import StepPlan, StepResult
from nanovllm.runner.workers import Ranks


def start_runner(config: Config, known_vocab: NDArray[np.bool_]) -> ModelRunner:
    """What `ModelRunner` is for one rank; for more, it starts the others. Raises as `ModelRunner` does, ValueError with
    the numbers if there are fewer GPUs than ranks, and RankError if a rank fails."""
    return ModelRunner(config, known_vocab) if config.tensor_parallel_size == 1 else RankedRunner(config, known_vocab)


class RankedRunner(ModelRunner):
    """Rank 0: it tells the other ranks what it does, so that all carry out the same steps.

    An error on any rank raises RankError and ends them all.
    """

    def __init__(self, config: Config, known_vocab: NDArray[np.bool_]) -> None:
        self.is_open = True
        devices = rank_devices(pick_device(config.device), config.tensor_parallel_size)
        self.ranks = Ranks(devices, config.vision_parallel == "data", ModelRunner, (config,))
        try:
            with self.ranks.together():
                super().__init__(config, known_vocab, self.ranks.parallel, devices[0])
                self.ranks.await_ready()
        except BaseException:
            self.ranks.close()
            raise

    def launch(self, plan: StepPlan) -> StepInFlight:
        with self._in_step():
            self.ranks.tell(plan)
            return super().launch(plan)

    def collect(self, step: StepInFlight) -> StepResult:
        with self._in_step():
            return super().collect(step)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            with self.ranks.together():
                yield
        except BaseException:
            if self.ranks.failure is not None:
                self.close()
            raise

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.ranks.close()
            super().close()


def rank_devices(first: torch.device, size: int) -> list[torch.device]:
    """One device a rank: the CPU for all of them, or GPUs from `first` on; ValueError if those are too few."""
    if first.type == "cpu":
        return [first] * size
    there = torch.cuda.device_count() - first.index
    if there < size:
        raise ValueError(f"tensor_parallel_size={size}, but there are {there} GPUs from {first} on; lower it, or check "
                         "CUDA_VISIBLE_DEVICES")
    return [torch.device("cuda", first.index + rank) for rank in range(size)]
