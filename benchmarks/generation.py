"""Text in, text out: the throughput benchmark and the latency of small batches."""
from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from benchmarks.floors import Ceilings, generation_floors
from benchmarks.report import Result
from nanovllm import LLM, SamplingParams

TEMPERATURE = 0.6
MIN_LENGTH = 100            # tokens of the shortest prompt and output
MAX_ID = 10000
FULL_SIZE = (256, 1024, 1024)                   # requests, longest prompt, longest output
FULL_SIZE_TOKENS = {0: (142_827, 133_966)}      # seed -> prompt and output tokens at that size
LATENCY_BATCHES, LATENCY_INPUT, LATENCY_OUTPUT = (1, 8, 32), 100, 512
WARM_UP_OUTPUT = 8


@dataclass(frozen=True)
class Work:
    """Prompts of token ids, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def throughput_work(seed: int, num_seqs: int, max_input: int, max_output: int, vocab_size: int) -> Work:
    """Random prompts, drawn one after the other, then random output lengths."""
    rng, max_id = random.Random(seed), min(MAX_ID, vocab_size - 1)
    prompts = [[rng.randint(0, max_id) for _ in range(rng.randint(min(MIN_LENGTH, max_input), max_input))]
               for _ in range(num_seqs)]
    work = Work(prompts, [rng.randint(min(MIN_LENGTH, max_output), max_output) for _ in range(num_seqs)])
    expected = FULL_SIZE_TOKENS.get(seed)
    if expected is not None and max_id == MAX_ID and (num_seqs, max_input, max_output) == FULL_SIZE:
        assert (work.num_prompt_tokens, work.num_output_tokens) == expected
    return work


def latency_work(num_seqs: int, input_len: int, output_len: int, vocab_size: int) -> Work:
    """Requests of one length, which all start and end together."""
    rng, max_id = random.Random(num_seqs), min(MAX_ID, vocab_size - 1)
    return Work([[rng.randint(0, max_id) for _ in range(input_len)] for _ in range(num_seqs)], [output_len] * num_seqs)


def measure(llm: LLM, work: Work, mode: str, ceilings: Ceilings, seed: int | None = None) -> Result:
    """Runs the work after a warm-up on its own prompts, with empty caches."""
    llm.generate(work.prompts, _params(work, WARM_UP_OUTPUT), use_tqdm=False)
    llm.reset_caches()
    params = _params(work, max(work.output_lens))
    start = perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = perf_counter() - start
    generated = sum(len(output["token_ids"]) for output in outputs)
    cached = sum(output["num_cached_tokens"] for output in outputs)
    assert generated == work.num_output_tokens and cached == 0
    print(f"{mode}: {len(outputs)} requests, {work.num_prompt_tokens:,} prompt tokens, {generated:,} output tokens, "
          f"{cached} prefix-hit tokens, {seconds:.2f} s")
    floors = generation_floors(llm.config.model_config, llm.runner.dtype.itemsize, list(map(len, work.prompts)),
                               work.output_lens, ceilings)
    floor = sum(floors.values())
    print(f"floor {floor:.2f} s: " + ", ".join(f"{name} {part:.2f}" for name, part in floors.items()))
    return Result(mode, "nanovllm", len(outputs), seconds, seed=seed, output_tok_per_s=generated / seconds,
                  ttft_ms=1e3 * median(output["ttft"] for output in outputs), call_ms=1e3 * seconds,
                  floor=generated / floor)


def _params(work: Work, limit: int) -> list[SamplingParams]:
    return [SamplingParams(TEMPERATURE, min(new, limit), ignore_eos=True) for new in work.output_lens]
