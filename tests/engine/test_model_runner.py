"""Steps of random spans, chunks and moved KV against one dense forward pass of transformers, and a runner's life."""
from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm.config import Config
from nanovllm.engine.encoder_cache_manager import EncoderCacheManager
from nanovllm.engine.model_runner import ModelRunner, pick_device
from nanovllm.image.hashing import content_hash
from nanovllm.plan import KVCopy, SamplingBatch, SpanTable, Stage
from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.engine.step_plans import DEVICES, Sequences, check, make_runner, random_ids


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


def text_logits(path: Any, sequences: Sequences) -> list[Tensor]:
    """Logits [tokens, vocab] of each prompt by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [reference(input_ids=torch.from_numpy(ids)[None]).logits[0] for ids in sequences.ids]


# ---------------------------------------------------------------- spans

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_random_spans_in_random_steps(qwen3, seed, device):
    """Chunks, several spans of one sequence in a step, single tokens: each row equals the dense pass."""
    rng = random.Random(seed)
    sequences = Sequences(random_ids([37, 5, 90, 64], seed))
    expected = text_logits(qwen3, sequences)
    runner = make_runner(qwen3, device=device)
    queues = []
    for seq, ids in enumerate(sequences.ids):
        cuts = sorted({0, len(ids), len(ids) - 1, *(rng.randrange(1, len(ids)) for _ in range(4))})
        queues.append([(seq, start, stop) for start, stop in pairwise(cuts)])
    while any(queues):
        spans = [queue.pop(0) for queue in queues for _ in range(min(len(queue), rng.randint(0, 3)))]
        if spans:
            result = runner.execute(sequences.plan(spans))
            for row, (seq, _, stop) in enumerate(spans):
                check(result, row, expected[seq][stop - 1])


def test_a_step_without_logits(qwen3):
    sequences = Sequences(random_ids([20]))
    runner = make_runner(qwen3)
    result = runner.execute(sequences.plan([(0, 0, 12)], rows=[]))
    assert result.token_ids.shape == result.finite.shape == (0,) and result.logprobs is None
    check(runner.execute(sequences.plan([(0, 12, 20)])), 0, text_logits(qwen3, sequences)[0][-1])


@pytest.mark.parametrize("device", DEVICES)
def test_steps_fed_with_ids_that_only_the_device_knows(qwen3, device):
    """Launched before the one before is collected, a decode step equals one that is told its ids."""
    sequences = Sequences(random_ids([30, 40]))
    prompts = [ids[:-8] for ids in sequences.ids]
    told, fed = make_runner(qwen3, device=device), make_runner(qwen3, device=device)
    spans = [(seq, 0, len(ids)) for seq, ids in enumerate(prompts)]
    expected, in_flight = [told.execute(sequences.plan(spans))], [fed.launch(sequences.plan(spans))]
    for _ in range(6):
        spans = [(seq, stop, stop + 1) for seq, _, stop in spans]
        for (seq, start, _), token in zip(spans, expected[-1].token_ids):
            sequences.ids[seq][start] = token
        expected.append(told.execute(sequences.plan(spans)))
        for seq, start, _ in spans:
            sequences.ids[seq][start] = 0
        in_flight.append(fed.launch(sequences.plan(spans, fed=np.array([[0, 1], [0, 1]]))))
    assert [fed.collect(step).token_ids.tolist() for step in in_flight] == [r.token_ids.tolist() for r in expected]


def test_a_nan_in_one_row_is_that_rows_alone(qwen3):
    sequences = Sequences(random_ids([9, 9]))
    runner = make_runner(qwen3)
    embed = runner.model.embed
    runner.model.embed = lambda token_ids: torch.cat((embed(token_ids)[:-1], embed(token_ids)[-1:] * float("nan")))
    result = runner.execute(sequences.plan([(0, 0, 9), (1, 0, 9)]))
    assert result.finite.tolist() == [True, False] and result.token_ids[1] == 0
    assert result.token_ids[0] == text_logits(qwen3, sequences)[0][-1].argmax()


@pytest.mark.gpu
def test_launching_a_step_never_waits_for_the_gpu(qwen3):
    sequences = Sequences(random_ids([30, 40, 50, 20]))
    runner = make_runner(qwen3, device="cuda")
    sampling = SamplingBatch(
        temperature=np.full(4, 0.7, np.float32), top_k=np.array([0, 1, 5, 0]), top_p=np.float32([1, 1, 0.9, 0.8]),
        min_p=np.float32([0, 0, 0.1, 0]), seed=np.arange(4), token_index=np.arange(4),
        repetition_penalty=np.float32([1, 1.2, 1, 1.5]), seq_rows=np.arange(4), banned=((1, (3, 4)),),
        num_logprobs=(None, 2, None, -1))
    plan = replace(sequences.plan([(seq, 0, len(ids)) for seq, ids in enumerate(sequences.ids)]), sampling=sampling,
                   penalty_resets=((1, sequences.ids[1]), (3, sequences.ids[3])), fed=np.array([[3], [2]]))
    runner.execute(plan)            # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = runner.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner.collect(step).finite.all()


# ---------------------------------------------------------------- moved KV

@pytest.mark.parametrize("shift", [0, 3, 40])
def test_kv_moved_in_a_model_of_one_layer_is_exact(tmp_path, shift):
    """Keys and values of one layer depend on their own token and position alone."""
    path = make_qwen3(tmp_path, num_hidden_layers=1)
    middle = random_ids([25], seed=5)[0]
    first, second = random_ids([7, 9], seed=1), random_ids([7 + shift, 12], seed=2)
    sequences = Sequences([first[0] + middle + first[1], second[0] + middle + second[1]])
    runner = make_runner(path)
    runner.execute(sequences.plan([(0, 0, 41)]))
    start = 7 + shift
    copy = KVCopy(tuple(sequences.tables[0]), 7, tuple(sequences.tables[1]), start, 25, shift, (2,))
    spans = [(1, 0, start + 2), (1, start + 25, start + 37)]       # with the two leading rows of the middle
    result = runner.execute(sequences.plan(spans, copies=(copy,)))
    expected = text_logits(path, sequences)[1]
    for row, (_, _, stop) in enumerate(spans):
        check(result, row, expected[stop - 1])


def test_rows_dropped_layer_by_layer_use_the_copied_kv(qwen3):
    """One prompt twice: of 30 copied rows, layer 0 recomputes 12, layer 1 recomputes 5, and layer 2 none."""
    ids = random_ids([60], seed=3)[0]
    sequences = Sequences([ids, ids])
    runner = make_runner(qwen3)
    runner.execute(sequences.plan([(0, 0, 60)]))
    copy = KVCopy(tuple(sequences.tables[0]), 10, tuple(sequences.tables[1]), 10, 30, 0, (12, 5, 0))
    later = [Stage(1, np.r_[0:15, 22:42], sequences.table([(1, 0, 15), (1, 40, 60)])),
             Stage(2, np.r_[0:10, 15:35], sequences.table([(1, 0, 10), (1, 40, 60)]))]
    result = runner.execute(sequences.plan([(1, 0, 22), (1, 40, 60)], later, rows=[9, 29], copies=(copy,)))
    expected = text_logits(qwen3, sequences)[1]
    check(result, 0, expected[9])
    check(result, 1, expected[59])


def test_a_stage_may_have_no_rows_left(qwen3):
    """A chunk inside an image all of whose rows a ratio per layer drops."""
    sequences = Sequences(random_ids([40], seed=4))
    runner = make_runner(qwen3)
    no_ints = np.empty(0, np.int64)
    none = SpanTable(no_ints, no_ints, np.empty((0, 3), np.int32), no_ints)
    result = runner.execute(sequences.plan([(0, 0, 8)], [Stage(1, no_ints, none)], rows=[]))
    assert len(result.token_ids) == 0
    written = runner.kv_cache[:, 0, sequences.tables[0][0], :8].isfinite().flatten(1).all(1)
    assert written.tolist() == [True, False, False]


# ---------------------------------------------------------------- sizes, life

def test_the_cpu_pool_has_the_size_asked_for(qwen2_5_vl):
    runner = ModelRunner(Config(str(qwen2_5_vl), kvcache_memory_gb=0.05, encoder_cache_ratio=0.5, device="cpu"))
    assert 0.049 * 2**30 < runner.kv_cache.nbytes <= 0.05 * 2**30
    assert 0.9 * runner.kv_cache.nbytes < runner.encoder_cache.rows.nbytes <= runner.kv_cache.nbytes
    assert runner.kv_cache.shape[2] == runner.num_kvcache_blocks
    assert runner.encoder_cache.num_blocks == runner.encoder_num_blocks
    with pytest.raises(ValueError, match="kvcache_memory_gb"):
        ModelRunner(Config(str(qwen2_5_vl), kvcache_memory_gb=1e-6, device="cpu"))


def test_dummy_weights_need_no_files(qwen3, tmp_path):
    for file in qwen3.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    runner = make_runner(tmp_path, load_format="dummy")
    result = runner.execute(Sequences(random_ids([20])).plan([(0, 0, 20)]))
    assert result.finite.all()


def test_a_closed_runner_holds_no_memory(qwen3):
    runner = make_runner(qwen3)
    runner.close()
    assert not [name for name, value in vars(runner).items() if isinstance(value, Tensor | torch.nn.Module)]


def test_bytes_and_names_of_pixels_are_one_identity():
    pixels, grid = torch.randn(16, 1176), torch.tensor([1, 4, 4])
    assert EncoderCacheManager.compute_hash(pixels, grid) == content_hash(pixels.numpy(), (1, 4, 4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_an_error():
    assert pick_device(None).type == pick_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match='give device="cpu"'):
        pick_device("cuda")
