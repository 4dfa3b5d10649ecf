"""The runner of an engine: alone, the first of several ranks in step, or one that follows the first."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner, StepInFlight, pick_device
from nanovllm.parallel import launched_rank
from nanovllm.plan import StepPlan, StepResult
from nanovllm.runner.launched import FirstRank, JoinedRanks
from nanovllm.runner.workers import Ranks


def start_runner(config: Config, known_vocab: NDArray[np.bool_]) -> ModelRunner:
    """What tensor_parallel_size and the environment ask for: the only rank; the first, which starts the others; or one
    of those that a launcher has started.

    Raises as `ModelRunner` does, ValueError with the numbers if there are fewer GPUs or launched processes than ranks,
    and RankError if a rank fails.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return ModelRunner(config, known_vocab)
    first, rank = pick_device(config.device), launched_rank(size)
    spread = config.vision_parallel == "data"
    if rank is None:
        devices = rank_devices(first, size)
        return RankedRunner(config, known_vocab, Ranks(devices, spread, ModelRunner, (config,)))
    device = launched_device(first)
    if device.type == "cuda":
        torch.cuda.set_device(device)       # for good: this process was launched for it
    place = rank, size, device, spread
    if rank:
        return FollowingRunner(config, FirstRank(*place))
    return RankedRunner(config, known_vocab, JoinedRanks(*place))


class RankedRunner(ModelRunner):
    """Rank 0: it tells the other ranks what it does, so that all carry out the same steps.

    An error on any rank raises RankError and ends them all.
    """

    def __init__(self, config: Config, known_vocab: NDArray[np.bool_], ranks: Ranks) -> None:
        self.is_open = True
        self.ranks = ranks
        try:
            with ranks.together():
                super().__init__(config, known_vocab, ranks.parallel, ranks.device)
                ranks.await_ready()
        except BaseException:
            ranks.close()
            raise

    def launch(self, plan: StepPlan) -> StepInFlight:
        with self._in_step():
            self.ranks.tell(plan)
            return super().launch(plan)

    def collect(self, step: StepInFlight) -> StepResult:
        with self._in_step():
            return super().collect(step)

    @contextmanager
    def call(self) -> Iterator[bool]:
        try:
            yield True
        finally:
            self.ranks.end_call()

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
            super().close()         # first: NCCL waits for the end of every CUDA graph that it is part of
            self.ranks.close()


class FollowingRunner(ModelRunner):
    """A launched rank behind the first: each call carries out what rank 0 does in the same call."""

    def __init__(self, config: Config, first_rank: FirstRank) -> None:
        self.first_rank = first_rank
        with first_rank.told_of_errors():
            super().__init__(config, None, first_rank.parallel, first_rank.device)
            first_rank.say_ready()

    @contextmanager
    def call(self) -> Iterator[bool]:
        with self.first_rank.told_of_errors():
            self.first_rank.follow(self)
        yield False

    def close(self) -> None:
        super().close()
        self.first_rank.close()


def launched_device(first: torch.device) -> torch.device:
    """The device of a launched rank: the CPU, or the GPU of its place on its machine."""
    return first if first.type == "cpu" else torch.device("cuda", int(os.environ.get("LOCAL_RANK", first.index)))


def rank_devices(first: torch.device, size: int) -> list[torch.device]:
    """One device a rank: the CPU for all of them, or GPUs from `first` on; ValueError if those are too few."""
    if first.type == "cpu":
        return [first] * size
    there = torch.cuda.device_count() - first.index
    if there < size:
        raise ValueError(f"tensor_parallel_size={size}, but there are {there} GPUs from {first} on; lower it, or check "
                         "CUDA_VISIBLE_DEVICES")
    return [torch.device("cuda", first.index + rank) for rank in range(size)]
