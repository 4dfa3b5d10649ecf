"""Engines as tests want them: small KV blocks, which users may not ask for, and integrity checked after every step."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.outputs import RequestOutput
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
