"""One picture, one token out: the first time, and again at the same place or behind other text."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.floors import Ceilings, image_call_floor
from benchmarks.generation import MAX_ID
from benchmarks.report import Result
from nanovllm import LLM, SamplingParams
from nanovllm.image.items import Grid, count_tokens
from nanovllm.model_config import ModelConfig, VisionConfig
from nanovllm.outputs import RequestOutput

TEXT_BEFORE, TEXT_BEHIND, MOVED_BY = 20, 20, 13     # tokens


@dataclass(frozen=True)
class Call:
    """One `generate` call and what came out of it."""

    seconds: float
    output: RequestOutput


def grid_of(vision: VisionConfig, width: int, height: int) -> Grid:
    """(t, h, w) in patches of a picture of so many pixels, each side rounded to whole tokens as the processor does."""
    merge = vision.spatial_merge_size
    side = vision.patch_size * merge        # of one token, in pixels
    return 1, max(1, round(height / side)) * merge, max(1, round(width / side)) * merge


class ImageWork:
    """Prompts of random ids around one picture of random pixels."""

    def __init__(self, config: ModelConfig, vocab_size: int, width: int, height: int, named: bool) -> None:
        assert config.vision is not None and config.image_token_id is not None
        assert config.vision_start_token_id is not None and config.vision_end_token_id is not None
        self.grid = grid_of(config.vision, width, height)
        self.num_tokens = count_tokens(self.grid, config.vision.spatial_merge_size)
        self.max_id = min(MAX_ID, vocab_size - 1)
        self.picture = [config.vision_start_token_id, *[config.image_token_id] * self.num_tokens,
                        config.vision_end_token_id]
        generator = torch.Generator().manual_seed(0)
        self.mm_inputs: dict[str, Any] = dict(
            pixel_values=torch.randn(prod(self.grid), config.vision.patch_dim, generator=generator),
            image_grid_thw=[list(self.grid)])
        if named:
            self.mm_inputs["image_hashes"] = [1]

    def prompt(self, before: int, behind: int, length_before: int = TEXT_BEFORE) -> list[int]:
        """The picture after text of seed `before` and ahead of text of seed `behind`."""
        return [*self._text(before, length_before), *self.picture, *self._text(behind, TEXT_BEHIND)]

    def _text(self, seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randint(0, self.max_id) for _ in range(length)]


def measure(llm: LLM, work: ImageWork, ratios: Sequence[float], repeats: int, ceilings: Ceilings) -> list[Result]:
    """A cold and a warm call, `repeats` times with empty caches for each ratio and place; the first time unmeasured."""
    results = []
    for ratio in ratios:
        pairs = {moved: [_pair(llm, work, ratio, moved) for _ in range(repeats + 1)][1:] for moved in (False, True)}
        cold = [first for first, _ in pairs[False] + pairs[True]]
        results.append(_result("image cold", llm, work, cold, ratio, None, ceilings))
        for moved in pairs:
            again = [second for _, second in pairs[moved]]
            results.append(_result("image warm", llm, work, again, ratio, moved, ceilings))
    return results


def _pair(llm: LLM, work: ImageWork, ratio: float, moved: bool) -> tuple[Call, Call]:
    llm.reset_caches()
    first = _call(llm, work, work.prompt(before=1, behind=2), ratio)
    again = work.prompt(3, 4, TEXT_BEFORE + MOVED_BY) if moved else work.prompt(1, 4)
    return first, _call(llm, work, again, ratio)


def _call(llm: LLM, work: ImageWork, prompt: list[int], ratio: float) -> Call:
    params = SamplingParams(max_tokens=1, ignore_eos=True, recompute_ratio=ratio)
    start = perf_counter()
    [output] = llm.generate(prompt, params, work.mm_inputs, use_tqdm=False)
    return Call(perf_counter() - start, output)


def _result(mode: str, llm: LLM, work: ImageWork, calls: list[Call], ratio: float, moved: bool | None,
            ceilings: Ceilings) -> Result:
    output = calls[-1].output
    num_prompt, num_reused = output["num_prompt_tokens"], output["num_reused_tokens"]
    num_computed = num_prompt - output["num_cached_tokens"] - num_reused
    floor = image_call_floor(llm.config.model_config, llm.runner.dtype.itemsize, num_prompt, num_computed, num_reused,
                             [work.grid] if output["vit_time"] > 0 else [], ceilings)
    return Result(
        mode, "nanovllm", 1, sum(call.seconds for call in calls), ratio=ratio, moved=moved,
        num_computed_tokens=num_computed, ttft_ms=1e3 * median(call.output["ttft"] for call in calls),
        hash_ms=1e3 * median(call.output["hash_time"] for call in calls),
        call_ms=1e3 * median(call.seconds for call in calls), floor=1e3 * floor)
