"""Steps of random spans, chunks, moved KV and images against one dense forward pass of transformers."""
from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration

from nanovllm.config import Config
from nanovllm.engine.encoder_cache_manager import EncoderCacheManager
from nanovllm.engine.model_runner import ModelRunner, pick_device
from nanovllm.image.hashing import content_hash
from nanovllm.plan import (
    ImageEncode,
    ImageRows,
    IntArray,
    KVCopy,
    SamplingBatch,
    SpanTable,
    Stage,
    StepPlan,
    StepResult,
)
from tests.checkpoints import make_qwen2_5_vl, make_qwen3

BLOCK = 16
NUM_BLOCKS = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Span = tuple[int, int, int]         # sequence, first token, token behind the last

GRIDS = [(1, 8, 12), (1, 4, 4), (1, 10, 4)]
ROWS = [t * h * w // 4 for t, h, w in GRIDS]


def make_runner(path: Any, **options: Any) -> ModelRunner:
    """A runner with small blocks, whose KV is NaN until it is written."""
    config = Config(str(path), num_kvcache_blocks=NUM_BLOCKS, **dict(device="cpu") | options)
    object.__setattr__(config, "kvcache_block_size", BLOCK)         # the public option is a multiple of 256
    runner = ModelRunner(config)
    runner.kv_cache.fill_(float("nan"))
    return runner


class Sequences:
    """Prompts with block tables in random order and rotary positions [axes, tokens]."""

    def __init__(self, ids: Sequence[Sequence[int]], positions: Sequence[IntArray] | None = None) -> None:
        free = random.Random(len(ids)).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.ids = [np.asarray(each, np.int64) for each in ids]
        self.positions = positions or [np.arange(len(each))[None] for each in ids]
        self.tables = [[free.pop() for _ in range(-(-len(each) // BLOCK))] for each in ids]

    def table(self, spans: Sequence[Span]) -> SpanTable:
        width = max(len(self.tables[seq]) for seq, _, _ in spans)
        tables = [self.tables[seq] + [0] * (width - len(self.tables[seq])) for seq, _, _ in spans]
        starts, stops = (np.array([span[i] for span in spans], np.int64) for i in (1, 2))
        return SpanTable(starts, stops - starts, np.array(tables, np.int32))

    def plan(self, spans: Sequence[Span], later: Sequence[Stage] = (), rows: Any = None, **given: Any) -> StepPlan:
        """Greedy, with all logprobs, of the last row of every span (or of `rows` of the last stage)."""
        if rows is None:
            rows = np.cumsum([stop - start for _, start, stop in spans]) - 1
        return StepPlan(
            token_ids=np.concatenate([self.ids[seq][start:stop] for seq, start, stop in spans]),
            positions=np.concatenate([self.positions[seq][:, start:stop] for seq, start, stop in spans], axis=1),
            stages=(Stage(0, None, self.table(spans)), *later), logits_rows=np.asarray(rows, np.int64),
            sampling=greedy(len(rows)), **given)


def greedy(num_rows: int) -> SamplingBatch:
    floats, ints = np.ones(num_rows, np.float32), np.zeros(num_rows, np.int64)
    return SamplingBatch(temperature=floats, top_k=ints + 1, top_p=floats, min_p=0 * floats, seed=ints,
                         token_index=ints, repetition_penalty=floats, seq_rows=np.arange(num_rows),
                         num_logprobs=(-1,) * num_rows)


def check(result: StepResult, row: int, logits: Tensor) -> None:
    """The row's id is the argmax of `logits` [vocab], and its logprobs are theirs."""
    assert result.finite[row] and result.logprobs is not None and result.logprobs[row] is not None
    ours = torch.tensor([result.logprobs[row][i] for i in range(len(logits))])
    assert (ours - logits.log_softmax(-1)).abs().max() < 1e-4
    assert result.token_ids[row] == logits.argmax()


def text_logits(path: Any, sequences: Sequences) -> list[Tensor]:
    """Logits [tokens, vocab] of each prompt by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return [reference(input_ids=torch.from_numpy(ids)[None]).logits[0] for ids in sequences.ids]


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen2_5_vl(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


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
    none = SpanTable(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3), np.int32))
    result = runner.execute(sequences.plan([(0, 0, 8)], [Stage(1, np.empty(0, np.int64), none)], rows=[]))
    assert len(result.token_ids) == 0
    written = runner.kv_cache[:, 0, sequences.tables[0][0], :8].isfinite().flatten(1).all(1)
    assert written.tolist() == [True, False, False]


# ---------------------------------------------------------------- images

def image_sequences(runner: ModelRunner, prompts: Sequence[Sequence[int | str]], seed: int = 0) -> Sequences:
    """Prompts of text lengths and images: an int is that many random ids, "i" stands for image i of GRIDS."""
    config, rng = runner.config.model_config, random.Random(seed)
    all_ids, all_positions = [], []
    for prompt in prompts:
        ids: list[int] = []
        columns: list[IntArray] = []
        place = 0
        for part in prompt:
            if isinstance(part, str):
                _, h, w = GRIDS[int(part)]
                y, x = np.divmod(np.arange(ROWS[int(part)]), w // 2)
                ids += [config.image_token_id] * len(y)
                columns.append(place + np.stack((0 * y, y, x)))
                place += max(h, w) // 2
            else:
                ids += [rng.randrange(250) for _ in range(part)]
                columns.append(np.tile(np.arange(place, place + part), (3, 1)))
                place += part
        all_ids.append(ids)
        all_positions.append(np.concatenate(columns, axis=1))
    return Sequences(all_ids, all_positions)


def pixels_of(image: int) -> Tensor:
    t, h, w = GRIDS[image]
    return torch.randn(t * h * w, 1176, generator=torch.Generator().manual_seed(image))


def image_logits(path: Any, sequences: Sequences, seq: int, images: Sequence[int]) -> Tensor:
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return reference(
            input_ids=torch.from_numpy(sequences.ids[seq])[None], pixel_values=torch.cat([*map(pixels_of, images)]),
            image_grid_thw=torch.tensor([GRIDS[i] for i in images]),
            position_ids=torch.from_numpy(sequences.positions[seq])[:, None]).logits[0]


def encode(runner: ModelRunner, image: int, seq_id: int, cached: bool) -> ImageEncode:
    blocks = tuple(runner.encoder_cache.allocate(image, ROWS[image])) if cached else None
    return ImageEncode(image, GRIDS[image], pixels_of(image), blocks, seq_id)


def rows_of(encoded: ImageEncode, first: int, stop: int, target: int) -> ImageRows:
    return ImageRows(encoded.key, ROWS[encoded.key], encoded.block_ids, first, stop, target)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", [True, False])
def test_images_of_two_requests_in_one_step(qwen2_5_vl, cached, device):
    runner = make_runner(qwen2_5_vl, device=device)
    sequences = image_sequences(runner, [[5, "0", 3, "1", 4], [2, "2", 6]])
    images = [encode(runner, image, seq_id, cached) for image, seq_id in ((0, 70), (1, 70), (2, 71))]
    first = len(sequences.ids[0])
    rows = (rows_of(images[0], 0, 24, 5), rows_of(images[1], 0, 4, 32), rows_of(images[2], 0, 10, first + 2))
    plan = sequences.plan([(0, 0, first), (1, 0, 18)], encodes=tuple(images), image_rows=rows)
    result = runner.execute(plan)
    check(result, 0, image_logits(qwen2_5_vl, sequences, 0, [0, 1])[-1])
    check(result, 1, image_logits(qwen2_5_vl, sequences, 1, [2])[-1])
    assert set(result.encode_seconds) == {70, 71} and min(result.encode_seconds.values()) > 0
    assert result.encode_seconds[70] == pytest.approx(result.encode_seconds[71] * (96 + 16) / 40)
    for image in range(3):
        assert (runner.encoder_cache.get_block_ids(image) is not None) == cached


def test_a_chunk_takes_its_rows_of_an_image_from_the_cache(qwen2_5_vl):
    runner = make_runner(qwen2_5_vl)
    sequences = image_sequences(runner, [[5, "0", 9]])
    expected = image_logits(qwen2_5_vl, sequences, 0, [0])
    image = encode(runner, 0, 1, cached=True)
    cuts = [0, 7, 20, 28, 29, 38]
    for start, stop in pairwise(cuts):
        first, last = max(start, 5), min(stop, 29)
        rows = (rows_of(image, first - 5, last - 5, first - start),) if first < last else ()
        result = runner.execute(sequences.plan([(0, start, stop)], encodes=(image,) if start == 0 else (),
                                               image_rows=rows))
        check(result, 0, expected[stop - 1])
        assert (result.encode_seconds == {}) == (start > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_moved_image_in_a_model_of_one_layer_is_exact(tmp_path, device):
    """All three axes of M-RoPE move by one delta."""
    path = make_qwen2_5_vl(tmp_path, num_hidden_layers=1)
    runner = make_runner(path, device=device)
    sequences = image_sequences(runner, [[5, "0", 3], [31, "0", 8]])
    image = encode(runner, 0, 1, cached=True)
    runner.execute(sequences.plan([(0, 0, 32)], encodes=(image,), image_rows=(rows_of(image, 0, 24, 5),)))
    copy = KVCopy(tuple(sequences.tables[0]), 5, tuple(sequences.tables[1]), 31, 24, 26, (3,))
    result = runner.execute(sequences.plan([(1, 0, 34), (1, 55, 63)], copies=(copy,),
                                           image_rows=(rows_of(image, 0, 3, 31),)))
    check(result, 1, image_logits(path, sequences, 1, [0])[-1])


def test_a_failed_encode_leaves_a_miss(qwen2_5_vl):
    runner = make_runner(qwen2_5_vl)
    sequences = image_sequences(runner, [[5, "0", 3]])
    image = encode(runner, 0, 1, cached=True)
    broken = ImageEncode(image.key, image.grid, torch.randn(7, 1176), image.block_ids, 1)
    with pytest.raises((ValueError, RuntimeError, AssertionError, IndexError)):
        runner.execute(sequences.plan([(0, 0, 32)], encodes=(broken,)))
    assert runner.encoder_cache.get_block_ids(0) is None
    runner.encoder_cache.free(0)
    runner.encoder_cache.check_integrity()


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
