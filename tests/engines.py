"""Engines as tests want them: small KV blocks, which users may not ask for, and integrity checked after every step."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.outputs import RequestOutput
from tests.oracle import Oracle
from tests.prompts import Prompt


def make_llm(folder: str | Path, *, block_size: int | None = None, **options: Any) -> LLM:
    """An engine on the CPU; `block_size` tokens a KV block, None: the option's default."""
    def config(model: str, **given: Any) -> Config:
        made = Config(model, **given)
        if block_size is not None:
            object.__setattr__(made, "kvcache_block_size", block_size)
        return made

    with mock.patch("nanovllm.engine.llm_engine.Config", config):
        return LLM(str(folder), **(dict(device="cpu", enforce_eager=True, kvcache_memory_gb=0.05) | options))


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy decoding of exactly `max_tokens` tokens."""
    return SamplingParams(**(dict(max_tokens=max_tokens, top_k=1, ignore_eos=True) | options))


def run(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[RequestOutput]:
    """Outputs in the order of the prompts, all queued at once; blocks and sequences agree after every step, and no
    block is held at the end."""
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    seq_ids = [llm.add_request(prompt.token_ids, each, prompt.mm_inputs) for prompt, each in zip(prompts, params)]
    outputs: dict[int, RequestOutput] = {}
    while not llm.is_finished():
        outputs |= {output["seq_id"]: output for output in llm.step()}
        check(llm)
    assert_idle(llm)
    return [outputs[seq_id] for seq_id in seq_ids]


def generate(llm: LLM, *prompts: Any, **options: Any) -> list[RequestOutput]:
    """Greedy outputs (8 tokens unless told otherwise) of prompts, given as `Prompt` or as `LLM.generate` takes them."""
    return llm.generate([getattr(each, "token_ids", each) for each in prompts], greedy(**({"max_tokens": 8} | options)),
                        mm_inputs=[getattr(each, "mm_inputs", None) for each in prompts], use_tqdm=False)


def check(llm: LLM) -> None:
    llm.scheduler.check_integrity()
    llm.scheduler.encoder_cache.check_integrity()


def assert_idle(llm: LLM) -> None:
    """No request is left, and nothing is held by one."""
    check(llm)
    assert llm.is_finished() and llm.scheduler.is_finished() and not llm.requests and not llm.scheduler.in_flight
    assert llm.stats()["blocks_in_use"] == 0
    assert all(entry.pins == 0 for entry in llm.scheduler.encoder_cache.entries.values())


def check_all(llm: LLM, oracle: Oracle, *prompts: Prompt, max_tokens: int = 6) -> list[RequestOutput]:
    """Runs the prompts in one batch; their outputs are right, and returned."""
    outputs = run(llm, prompts, greedy(max_tokens, logprobs=-1))
    for prompt, output in zip(prompts, outputs):
        assert_right(oracle, prompt, output)
    return outputs


def encoder_ratio(num_kv_blocks: int, num_encoder_blocks: int) -> float:
    """encoder_cache_ratio for so many blocks of encoder rows beside so many KV blocks, with the sizes that
    `checkpoints.make_qwen2_5_vl` has by default."""
    kv_floats, encoder_floats = num_kv_blocks * 2 * 3 * 2 * 16, (num_encoder_blocks + 0.5) * 64
    return encoder_floats / (encoder_floats + kv_floats)


@contextmanager
def encoded_grids(llm: LLM) -> Iterator[list[tuple[int, int, int]]]:
    """The grids that the vision tower is given, image by image, while the context lasts."""
    grids: list[tuple[int, int, int]] = []
    hook = llm.runner.model.visual.register_forward_hook(lambda _, args, out: grids.extend(map(tuple, args[1])))
    try:
        yield grids
    finally:
        hook.remove()


def assert_right(oracle: Oracle, prompt: Prompt, output: RequestOutput) -> None:
    """The output, greedy with logprobs=-1, is what a dense pass over the whole prompt gives."""
    assert_near(oracle.logprobs(prompt, output["token_ids"]), output)


def assert_near(expected: Tensor, output: RequestOutput) -> None:
    """Logprobs [tokens, vocab] as expected to 1e-4, and every token a most likely one."""
    difference = (dense_logprobs(output) - expected).abs().max().item()
    assert difference < 1e-4, f"logprobs differ by {difference}"
    drawn = expected.gather(1, torch.tensor(output["token_ids"])[:, None]).squeeze(1)
    assert (expected.amax(1) - drawn).max() < 1e-4, "a token is not the most likely one"


def dense_logprobs(output: RequestOutput) -> Tensor:
    """[tokens, vocab] of an output's logprobs=-1."""
    return torch.tensor([[row[token_id] for token_id in range(len(row))] for row in output["logprobs"]])
