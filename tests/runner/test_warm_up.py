"""The largest step and picture that the options allow, and what a card leaves for the caches after them."""
from __future__ import annotations

import json
import os
from collections import Counter
from math import prod

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.runner.warm_up import (
    RESERVE_BYTES,
    budget_of,
    graph_bytes,
    largest_picture,
    largest_step,
    max_patches_a_call,
    num_warm_up_blocks,
)
from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.interpreted import run_python

GIB = 1 << 30


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return str(make_qwen3(tmp_path_factory.mktemp("qwen3"), max_position_embeddings=65536))


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory):
    return str(make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"), max_position_embeddings=65536))


@pytest.mark.parametrize("budget, max_len", [(64, 1000), (1000, 300), (700, 700), (3, 1)])
def test_the_largest_step_fills_the_budget_and_ends_at_max_model_len(qwen3, budget, max_len):
    config = Config(qwen3, max_num_batched_tokens=budget, max_model_len=max_len, max_num_seqs=5)
    plan = largest_step(config)
    spans = plan.stages[0].spans
    assert plan.token_ids.shape == (budget,) and plan.positions.shape == (1, budget)
    assert spans.lengths.sum() == budget and (spans.lengths > 0).all()
    assert (spans.starts >= 0).all() and (spans.starts + spans.lengths == max_len).all()
    assert plan.positions.max() == max_len - 1
    assert spans.block_tables.max() < num_warm_up_blocks(config) == -(-max_len // 256)
    assert len(plan.logits_rows) == min(5, budget)


@pytest.mark.parametrize("max_len, rows", [(100, 100), (1000, 1000), (32768, 16384), (65536, 16384)])
def test_the_largest_picture_is_the_largest_that_fits(qwen2_5_vl, max_len, rows):
    config = Config(qwen2_5_vl, max_model_len=max_len)
    t, h, w = largest_picture(config)
    assert max_patches_a_call(config) == 4 * rows
    assert t == 1 and h % 2 == w % 2 == 0 and 0.9 * 4 * rows <= h * w <= 4 * rows


def test_a_text_model_takes_no_picture(qwen3):
    assert max_patches_a_call(Config(qwen3)) == 0


@pytest.mark.parametrize("make", [make_qwen3, make_qwen2_5_vl])
def test_the_largest_step_runs(make, tmp_path):
    config = Config(str(make(tmp_path)), max_num_batched_tokens=150, max_model_len=100, max_num_seqs=7,
                    num_kvcache_blocks=num_warm_up_blocks(Config(str(tmp_path), max_model_len=100)), device="cpu")
    result = ModelRunner(config).execute(largest_step(config))
    assert result.finite.all() and result.token_ids.shape == (7,) and result.logprobs is not None


def test_the_share_of_a_card_is_this_engines_whatever_others_hold():
    total, free = 140 * GIB, 84 * GIB - 10 * GIB           # another process holds 40 %, this one 10 GiB of weights
    taken = 12 * GIB + 3 * GIB + RESERVE_BYTES              # by weights and a step, and by graphs
    assert budget_of(total, 0.3, 12 * GIB, free, 2 * GIB, 3 * GIB) == int(0.3 * total) - taken
    assert budget_of(total, 0.5, 12 * GIB, free, 2 * GIB, 3 * GIB) == int(0.5 * total) - taken
    at_most = budget_of(total, 0.9, 12 * GIB, free, 2 * GIB, 3 * GIB)
    assert free - 6 * GIB < at_most < free - 5 * GIB, "never more than is free while a step runs"


def test_graphs_keep_the_logits_of_the_largest_batch_and_the_gate_of_the_longest_prefill(tmp_path):
    path = str(make_qwen3(tmp_path))
    text = Config(path).model_config.text
    assert graph_bytes(Config(path, max_num_seqs=6, max_num_batched_tokens=15), 2) == 6 * text.vocab_size * 2
    assert graph_bytes(Config(path, max_num_seqs=6), 2) == 2 * (
        6 * text.vocab_size + 3 * 2048 * text.intermediate_size)
    assert graph_bytes(Config(path, enforce_eager=True), 2) == 0


def test_nothing_left_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match=r"utilization=0\.05 of 80\.00 GiB is 4\.00 GiB.*take 12\.00 GiB.*raise"):
        budget_of(80 * GIB, 0.05, 12 * GIB, 60 * GIB, GIB, 0)
    with pytest.raises(ValueError, match=r"and 1\.00 GiB of the card are free"):
        budget_of(80 * GIB, 0.9, 12 * GIB, GIB, 2 * GIB, 0)


@pytest.mark.gpu
def test_the_caches_fit_the_share_on_a_gpu(qwen2_5_vl):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = Config(qwen2_5_vl, gpu_memory_utilization=0.1, max_model_len=2048)
    runner = ModelRunner(config)
    total = torch.cuda.get_device_properties(0).total_memory
    used = torch.cuda.memory_allocated() - before
    assert 0.05 * total < used <= 0.1 * total
    result = runner.execute(largest_step(config))
    assert result.finite.all() and torch.cuda.max_memory_allocated() - before <= 0.1 * total
    runner.close()
    assert torch.cuda.memory_allocated() - before < 100 << 20


@pytest.mark.gpu
def test_a_card_filled_to_nine_tenths_takes_its_first_large_pictures(tmp_path):
    """Layers as wide as Qwen2.5-VL-3B's, so that a picture of 3584x3584 needs gigabytes beside the caches."""
    make_qwen2_5_vl(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=2, intermediate_size=11008,
                   num_hidden_layers=2, max_position_embeddings=65536,
                   rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]))
    config["vision_config"] |= dict(depth=4, hidden_size=1280, num_heads=16, intermediate_size=3420,
                                    out_hidden_size=2048, fullatt_block_indexes=[3], window_size=112)
    (tmp_path / "config.json").write_text(json.dumps(config))
    grid, pad = (1, 256, 256), config["image_token_id"]
    with LLM(str(tmp_path), load_format="dummy", gpu_memory_utilization=0.9, max_num_seqs=8) as llm:
        assert torch.cuda.memory_allocated() > 0.8 * torch.cuda.get_device_properties(0).total_memory
        for num_pictures in (1, 2):
            pictures = [dict(pixel_values=torch.randn(prod(grid), 1176), image_grid_thw=[grid])
                        for _ in range(num_pictures)]
            prompts = [[1, *[pad] * (prod(grid) // 4), 2] for _ in pictures]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), pictures, use_tqdm=False)
            assert [output["finish_reason"] for output in outputs] == ["length"] * num_pictures


@pytest.mark.gpu
def test_decode_graphs_find_their_kernels_compiled(qwen3):
    run_python("from tests.runner.test_warm_up import list_late_kernels; list_late_kernels()", MODEL=qwen3)


def list_late_kernels() -> None:
    """In a process of its own, in which no kernel is compiled yet."""
    from triton import knobs

    from nanovllm.attention.fused import TritonOps
    from nanovllm.runner.cuda_graph import DecodeGraphs

    places, compiled = ["start"], Counter()

    def within(place, function):
        def run(*args, **kwargs):
            places.append(place)
            try:
                return function(*args, **kwargs)
            finally:
                places.pop()
        return run

    knobs.runtime.jit_post_compile_hook = lambda **launch: compiled.update(places[-1:])
    TritonOps.compile_ahead = staticmethod(within("ahead", TritonOps.compile_ahead))
    DecodeGraphs._capture = within("capture", DecodeGraphs._capture)
    config = Config(os.environ["MODEL"], dtype="bfloat16", gpu_memory_utilization=0.1, max_num_seqs=64)
    ModelRunner(config).close()
    assert compiled["ahead"] >= 20 and not compiled["capture"], compiled
