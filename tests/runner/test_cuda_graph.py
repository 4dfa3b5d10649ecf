"""Decode graphs: their sizes, what padding holds, and engines with them against engines without."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.runner.cuda_graph import DecodeInputs, graph_sizes
from nanovllm.runner.staging import packed_bytes, packed_views
from tests.engine.step_plans import Sequences, random_ids
from tests.engines import greedy, make_llm, run
from tests.prompts import Prompt, picture, prompt, text


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 250, 256, 300, 512])
def test_every_batch_has_a_graph(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs


def test_padding_writes_nowhere_whatever_the_buffer_held() -> None:
    shapes = DecodeInputs.shapes(4, 3, 10)
    inputs = DecodeInputs(*packed_views(torch.full((packed_bytes(shapes),), 77, dtype=torch.uint8), shapes))
    positions = [np.arange(3 * length).reshape(3, length) for length in (9, 40)]
    plan = Sequences(random_ids([9, 40]), positions).plan([(0, 8, 9), (1, 39, 40)], fed=np.array([[1], [0]]))
    inputs.fill(plan, block_size=16, spare_row=7)
    assert inputs.token_ids.tolist() == [*plan.token_ids, 0, 0] and inputs.fed.tolist() == [-1, 0, -1, -1]
    assert np.array_equal(inputs.positions[:, :2], plan.positions) and not inputs.positions[:, 2:].any()
    assert (inputs.slot_mapping[:2] >= 0).all() and inputs.slot_mapping[2:].tolist() == [-1, -1]
    assert inputs.seqlens_k.tolist() == [9, 40, 1, 1] and inputs.seq_rows.tolist() == [0, 1, 7, 7]
    assert not inputs.block_tables[:2, 3:].any() and not inputs.block_tables[2:].any()
    assert inputs.greedy.tolist() == [1] * 4 and inputs.temperature.flatten().tolist() == [1] * 4
    assert not inputs.keys[:, 2:].any()


# ---------------------------------------------------------------- engines on a GPU

@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[LLM, LLM]]:
    """With graphs and overlap, and with neither."""
    options = dict(device="cuda", attention_backend="triton", max_num_seqs=6, num_kvcache_blocks=40)
    with (make_llm(folder, enforce_eager=False, overlap=True, **options) as fast,
          make_llm(folder, enforce_eager=True, overlap=False, **options) as slow):
        yield fast, slow


def both(engines: tuple[LLM, LLM], prompts: list[Prompt], params: list[SamplingParams]) -> None:
    """The same tokens from both."""
    fast, slow = ([output["token_ids"] for output in run(llm, prompts, params)] for llm in engines)
    assert fast == slow and all(map(len, fast))


@pytest.mark.gpu
def test_random_draws_of_batches_that_shrink(engines: tuple[LLM, LLM]) -> None:
    """6, 5, ... 1 rows at once, greedy ones among them, with and without a picture, so three axes of positions."""
    prompts = [prompt(text(9 + i, i), *[picture(56, 84, i)] * (i % 2), text(5)) for i in range(6)]
    params = [SamplingParams(0.5 + 0.2 * i, 8 + 5 * i, ignore_eos=True, top_k=int(i % 3 == 2), seed=i)
              for i in range(6)]
    both(engines, prompts, params)


@pytest.mark.gpu
def test_rows_that_want_more_than_a_draw_leave_the_others_as_they_are(engines: tuple[LLM, LLM]) -> None:
    params = [SamplingParams(0.8, 12, seed=0), SamplingParams(0.8, 12, top_p=0.7, seed=1), greedy(30),
              SamplingParams(1.0, 12, repetition_penalty=1.4, seed=2), SamplingParams(0.8, 20, min_tokens=9, seed=3)]
    both(engines, [prompt(text(20, i)) for i in range(5)], params)


@pytest.mark.gpu
def test_capture_says_what_it_costs(engines: tuple[LLM, LLM]) -> None:
    fast, slow = (llm.runner.graph_cost for llm in engines)
    assert slow is None and fast is not None
    assert fast.num_graphs > 6 and fast.seconds > 0 and fast.num_bytes > 0
