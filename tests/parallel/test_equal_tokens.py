"""Two and four ranks give the tokens of one, for every kind of step, with vocabulary and feed-forward sizes padded, KV
heads copied, steps overlapped, and as CUDA graphs."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.engines import dense_logprobs, greedy, make_llm, run
from tests.prompts import Prompt, picture, prompt, text, video

# A few blocks of 16 tokens: decoding runs out of them, and requests are preempted. 48 tokens a step: prompts are cut.
SMALL = dict(block_size=16, max_num_batched_tokens=48, max_model_len=160, max_num_seqs=4)
STEPS = 14
RANKS = [
    pytest.param(dict(tensor_parallel_size=2, overlap=True), id="2 ranks, overlap"),
    pytest.param(dict(tensor_parallel_size=2, overlap=False, vision_parallel="data"), id="2 ranks, images spread"),
    pytest.param(dict(tensor_parallel_size=4, overlap=False), id="4 ranks"),
    *(pytest.param(dict(device="cuda", tensor_parallel_size=2, **options), id=name, marks=pytest.mark.multi_gpu)
      for name, options in (
          ("2 GPUs, graphs, overlap", dict(enforce_eager=False)),
          ("2 GPUs, graphs, images spread", dict(enforce_eager=False, overlap=False, vision_parallel="data")),
          ("2 GPUs, overlap", {})))]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One KV head for up to four ranks; neither 98 nor the vocabulary can be shared out evenly.
    return make_qwen3(tmp_path_factory.mktemp("text"), num_key_value_heads=1, intermediate_size=98, num_shards=2,
                      vocab_padding=3, attention_bias=True)


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("images"), tie=True, intermediate_size=98, vocab_padding=3,
                           vision=dict(num_heads=4, hidden_size=64, intermediate_size=78))


def texts() -> list[Prompt]:
    shared = text(70)
    return [prompt(shared), prompt(shared[:50], text(9, 1)), prompt(text(33, 2))]


def with_pictures() -> list[Prompt]:
    still, wide = picture(112, 112), picture(56, 140, 1)
    return [prompt(text(20), still, text(9)), prompt(text(20), still, text(5, 1), wide, text(4)),
            prompt(text(5, 2), video(3, 56, 84, 0.5), text(7), picture(84, 84, 2), text(3))]


def moved() -> list[Prompt]:
    """The pictures of `with_pictures` at other places."""
    still, wide = picture(112, 112), picture(56, 140, 1)
    return [prompt(text(31, 5), still, text(9, 6)), prompt(text(2, 7), still, text(21, 8), wide, text(5, 9))]


def same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for output, other in zip(outputs, expected, strict=True):
        assert output["token_ids"] == other["token_ids"] and len(output["token_ids"]) == STEPS
        difference = dense_logprobs(output) - dense_logprobs(other)
        assert difference.abs().max() < 1e-3
        assert output["num_reused_tokens"] == other["num_reused_tokens"]


def passes(folder: Path, prompts: Sequence[Sequence[Prompt]], ratios: Sequence[Any], num_blocks: int,
           **options: Any) -> Iterator[tuple[LLM, list[RequestOutput]]]:
    """Outputs of one engine for one list of prompts after the other."""
    with make_llm(folder, num_kvcache_blocks=num_blocks, **SMALL, **options) as llm:
        for each, ratio in zip(prompts, ratios, strict=True):
            yield llm, run(llm, each, greedy(STEPS, logprobs=-1, recompute_ratio=ratio))


def compare(folder: Path, options: dict[str, Any], prompts: Sequence[Sequence[Prompt]], ratios: Sequence[Any],
            num_blocks: int) -> dict[str, int]:
    """Each pass on one rank and on several; the several ranks' statistics.

    Both overlap steps or neither does: in a pool that is too small, when blocks are given up decides which images' KV
    is still there to be reused.
    """
    args = folder, prompts, ratios, num_blocks
    one = dict(device=options.get("device", "cpu"), overlap=options.get("overlap"))
    alone = [outputs for _, outputs in passes(*args, **one)]
    for (llm, outputs), expected in zip(passes(*args, **options), alone, strict=True):
        same(outputs, expected)
        stats = llm.stats()
    return stats


@pytest.mark.parametrize("options", [RANKS[0], RANKS[2], RANKS[3], RANKS[5]])
def test_text(text_model: Path, options: dict[str, Any]) -> None:
    stats = compare(text_model, options, [texts(), texts()], [0.0, 0.0], num_blocks=9)
    assert stats["preemptions"] > 0 and stats["cached_tokens"] > 0


@pytest.mark.parametrize("options", RANKS)
def test_pictures_cold_warm_and_moved(image_model: Path, options: dict[str, Any]) -> None:
    prompts = [with_pictures(), with_pictures(), moved()]
    stats = compare(image_model, options, prompts, [0.0, 0.0, (0.5, 0.5, 0.1)], num_blocks=9)
    assert stats["preemptions"] > 0 and stats["encoder_hits"] > 0 and stats["reused_tokens"] > 0


@pytest.mark.parametrize("options", [RANKS[0], RANKS[3]])
def test_what_is_drawn_without_filters(text_model: Path, options: dict[str, Any]) -> None:
    """In a CUDA graph the draw is part of it."""
    params = [greedy(STEPS), *(SamplingParams(temperature=0.8, max_tokens=STEPS, ignore_eos=True, seed=seed)
                               for seed in range(2))]
    drawn = []
    for each in (dict(device=options.get("device", "cpu")), options):
        with make_llm(text_model, num_kvcache_blocks=40, **SMALL, **each) as llm:
            drawn.append([output["token_ids"] for output in run(llm, texts(), params)])
    assert drawn[0] == drawn[1]
