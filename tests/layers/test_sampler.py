"""The sampler against plain references: exact argmax, softmax frequencies, filters, penalties, reproducible draws."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm.layers.sampler import Sampler, SamplerOutput, gumbel_noise, logprob_dicts, uniform_bits
from nanovllm.plan import SamplingBatch
from nanovllm.runner import inputs
from nanovllm.runner.inputs import sampling_inputs, stream_keys
from nanovllm.runner.staging import to_device

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def make_batch(num_rows: int, **given: Any) -> SamplingBatch:
    """Rows with nothing asked for but a draw from the softmax; a scalar holds for all rows."""
    values: dict[str, Any] = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, token_index=0,
                                  repetition_penalty=1.0, seq_rows=np.arange(num_rows)) | given
    floats = ("temperature", "top_p", "min_p", "repetition_penalty")
    rest = {name: values.pop(name) for name in ("banned", "num_logprobs") if name in values}
    return SamplingBatch(**rest, **{
        name: np.broadcast_to(np.asarray(value, np.float32 if name in floats else np.int64), num_rows).copy()
        for name, value in values.items()})


def sample(logits: Tensor, batch: SamplingBatch, sampler: Sampler | None = None, resets: Any = (),
           known_vocab: Any = None) -> SamplerOutput:
    sampler = sampler or Sampler(logits.shape[1], len(logits), known_vocab, CPU)
    return sampler(logits.clone(), sampling_inputs(batch, resets, logits.shape[1]))


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def frequencies(logits: Tensor, num_draws: int, **given: Any) -> Tensor:
    """How often each id came up in the draws of one sequence's first `num_draws` tokens."""
    batch = make_batch(num_draws, token_index=np.arange(num_draws), **given)
    ids = sample(logits.expand(num_draws, -1), batch).token_ids
    return torch.bincount(ids, minlength=logits.shape[-1]) / num_draws


def assert_matches(counted: Tensor, expected: Tensor, num_draws: int) -> None:
    """Each frequency within 5 standard deviations, and nothing where nothing may be."""
    assert (counted[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / num_draws).sqrt()
    assert ((counted - expected).abs() <= 5 * deviation + 1e-9).all()


# ---------------------------------------------------------------- greedy, masks, bad rows

def test_greedy_rows_are_the_argmax_whatever_the_temperature_and_the_neighbours():
    logits = random_logits(8, 50)
    logits[:, 7] = -INF
    greedy = [0, 2, 5, 7]
    top_k = np.where(np.isin(np.arange(8), greedy), 1, 0)
    batch = make_batch(8, temperature=[1e-9, 0.7, 5, 1e-6, 1, 1e9, 1, 1e-10], top_k=top_k, top_p=[1, 0.5] * 4,
                       seed=np.arange(8))
    out = sample(logits, batch)
    assert out.finite.all()
    assert out.token_ids[greedy].tolist() == logits.argmax(-1)[greedy].tolist()
    assert out.token_ids[3] == logits[3].argmax(), "so cold a draw is the argmax as well"


def test_of_equal_logits_greedy_takes_the_first():
    logits = torch.zeros(1, 1000)
    logits[0, [300, 301, 999]] = 2.5
    assert sample(logits, make_batch(1, top_k=1)).token_ids.item() == 300


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_bad_rows_are_marked_and_harm_no_neighbour(top_k):
    good = random_logits(2, 40)
    bad = random_logits(4, 40)
    bad[0, 3], bad[1], bad[2], bad[3, 39] = NAN, NAN, -INF, INF
    batch = make_batch(6, top_k=top_k, top_p=0.9 if top_k == 5 else 1.0, min_p=0.01, seed=np.arange(6))
    alone = sample(good, make_batch(2, top_k=top_k, top_p=0.9 if top_k == 5 else 1.0, min_p=0.01, seed=[0, 5]))
    out = sample(torch.cat((good[:1], bad, good[1:])), batch)
    assert out.finite.tolist() == [True, False, False, False, False, True]
    assert out.token_ids[1:5].tolist() == [0, 0, 0, 0]
    assert out.token_ids[[0, 5]].tolist() == alone.token_ids.tolist()


def test_ids_no_tokenizer_knows_are_never_sampled():
    known = np.ones(64, bool)
    known[[0, 60, 61, 62, 63]] = False
    logits = torch.zeros(4000, 64)
    logits[:, ~known] = 9.0
    logits[:, 62] = NAN
    out = sample(logits, make_batch(4000, token_index=np.arange(4000), top_k=[0, 1] * 2000), known_vocab=known)
    assert out.finite.all() and known[out.token_ids.numpy()].all()


def test_banned_ids_are_banned_in_their_row_alone():
    logits = random_logits(3, 30)
    best = logits.argsort(descending=True)
    out = sample(logits, make_batch(3, top_k=1, banned=((0, tuple(best[0, :2].tolist())), (2, (best[2, 0].item(),)),
                                                        (1, ()))))
    assert out.token_ids.tolist() == [best[0, 2], best[1, 0], best[2, 1]]


# ---------------------------------------------------------------- distributions

@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_frequencies_are_those_of_the_softmax(temperature):
    logits = random_logits(12)
    counted = frequencies(logits, 40_000, temperature=temperature)
    assert_matches(counted, (logits / temperature).softmax(-1), 40_000)


def reference_probs(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Temperature, top-k, top-p of the rest, min-p: one row, value by value."""
    probs = (logits / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = ranked[:top_k] if top_k else ranked
    total, mass, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if mass < top_p * total or top_p == 1:
            nucleus.append(i)
        mass += probs[i]
    nucleus = [i for i in nucleus if probs[i] >= min_p * probs[ranked[0]]]
    result = torch.zeros(len(probs))
    for i in nucleus:
        result[i] = probs[i]
    return result / result.sum()


@pytest.mark.parametrize("filters", [
    dict(top_k=3), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=6, top_p=0.8), dict(top_k=8, top_p=0.95, min_p=0.1),
    dict(top_k=100), dict(top_p=1e-6), dict(top_p=0.9, min_p=0.3), dict(min_p=1.0)])
def test_filters_keep_what_a_plain_reference_keeps(filters):
    logits = random_logits(16, seed=3)
    options = dict(temperature=1.7, top_k=0, top_p=1.0, min_p=0.0) | filters
    assert_matches(frequencies(logits, 30_000, **options), reference_probs(logits, **options), 30_000)


def test_rows_with_different_filters_keep_their_own():
    logits, n = random_logits(16, seed=4), 12_000
    options = [dict(top_k=2), dict(top_p=0.5), dict(min_p=0.3), dict(top_k=9, top_p=0.6), {}]
    full = [dict(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0) | each for each in options]
    batch = make_batch(5 * n, token_index=np.arange(5 * n), **{
        name: np.tile([each[name] for each in full], n) for name in full[0]})
    ids = sample(logits.expand(5 * n, -1), batch).token_ids.view(n, 5)
    for column, each in enumerate(full):
        counted = torch.bincount(ids[:, column], minlength=16) / n
        assert_matches(counted, reference_probs(logits, **each), n)


# ---------------------------------------------------------------- random numbers

def test_a_draw_depends_on_seed_and_token_index_alone(monkeypatch):
    logits = random_logits(1, 300).expand(40, -1)
    given = dict(seed=np.arange(40) % 7, token_index=np.arange(40) // 7, temperature=4.0, top_p=0.95)
    alone = [sample(logits[:1], make_batch(1, seed=i % 7, token_index=i // 7, temperature=4.0, top_p=0.95))
             .token_ids.item() for i in range(40)]
    assert len(set(alone)) > 10
    batch = make_batch(40, **given)
    assert sample(logits, batch).token_ids.tolist() == alone
    mixed = make_batch(40, top_k=[0, 1] * 20, **given)
    assert sample(logits, mixed).token_ids.tolist()[::2] == alone[::2]
    monkeypatch.setattr(inputs, "MAX_DRAWN_VALUES", 3 * 300)      # the batch in groups of three rows
    assert sample(logits, batch).token_ids.tolist() == alone


def test_random_bits_are_those_of_unsigned_arithmetic():
    """Pins the stream: other backends reproduce these bits."""
    mask = 0xFFFFFFFF

    def bits(token_id: int, key0: int, key1: int) -> int:
        x = (token_id * 0x9E3779B1 + key0) & mask
        x = (x ^ x >> 16) * 0x21F0AAAD & mask
        x = ((x ^ x >> 15) + key1) * 0x735A2D97 & mask
        x = (x ^ x >> 15) * 0x9E485565 & mask
        return x ^ x >> 16

    keys = stream_keys(np.array([0, 1, -5, 2**62]), np.array([0, 9, 1, 31]))
    ours = uniform_bits(torch.from_numpy(keys), 200).numpy().view(np.uint32)
    unsigned = keys.view(np.uint32)[:, :, 0].tolist()
    assert ours.tolist() == [[bits(i, key0, key1) for i in range(200)] for key0, key1 in zip(*unsigned)]


def test_stream_keys_are_those_of_splitmix64():
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    golden, cases = 0x9E3779B97F4A7C15, [(0, 0), (1, 9), (-5, 1), (2**62, 31)]
    keys = [mix(mix((seed & mask) + golden & mask) + golden * (index + 1) & mask) for seed, index in cases]
    ours = stream_keys(*(np.array(column) for column in zip(*cases))).view(np.uint32)[:, :, 0].T.tolist()
    assert ours == [[key & 0xFFFFFFFF, key >> 32] for key in keys]


def test_noise_is_gumbel_and_streams_are_unrelated():
    seeds, index = np.repeat(np.arange(40), 10), np.tile(np.arange(10), 40)
    noise = gumbel_noise(torch.from_numpy(stream_keys(seeds, index)), 2000).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.02
    uniform = (-(-noise).exp()).exp()
    counts = torch.histc(uniform, bins=50, min=0, max=1) / uniform.numel()
    assert (counts - 0.02).abs().max() < 0.0012
    centred = uniform - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(10, 0), centred.roll(64, 1), centred.roll(7, 0)):
        assert abs((centred * other).mean() * 12) < 0.006         # neighbouring indices, ids and seeds
    grid = np.corrcoef(uniform[:60].numpy())
    assert np.abs(grid - np.eye(60)).max() < 0.12


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws():
    batch = make_batch(300, token_index=np.arange(300), top_k=[0, 1, 7] * 100, top_p=[1, 1, 0.9, 0.8] * 75,
                       temperature=2.0, min_p=[0, 0.05] * 150)
    logits = random_logits(300, 5000)
    cuda = torch.device("cuda")
    keys = torch.from_numpy(stream_keys(batch.seed, batch.token_index))
    assert torch.equal(uniform_bits(keys.to(cuda), 5000).cpu(), uniform_bits(keys, 5000))
    inputs = to_device(sampling_inputs(batch, (), 5000), cuda)
    ours = Sampler(5000, 300, None, cuda)(logits.to(cuda), inputs).token_ids.cpu()
    assert (ours == sample(logits, batch).token_ids).float().mean() > 0.99, "log differs in the last bit at most"


# ---------------------------------------------------------------- penalties, logprobs

def test_repetition_penalty_equals_that_of_transformers_over_steps():
    vocab, prompts, penalties = 40, {2: [1, 2, 2, 9], 0: [5], 3: [30, 31]}, {2: 1.3, 0: 1.0, 3: 0.7}
    sampler = Sampler(vocab, 4, None, CPU)
    so_far = {row: list(ids) for row, ids in prompts.items()}
    resets = tuple((row, np.array(ids)) for row, ids in prompts.items() if penalties[row] != 1)
    for step in range(12):
        if step == 6:                                              # another request takes row 3
            so_far[3] = [7, 8]
            resets = ((3, np.array([7, 8])),)
        rows = list(prompts)
        logits = random_logits(3, vocab, seed=step % 3)
        expected = [int(RepetitionPenaltyLogitsProcessor(penalties[row])(torch.tensor([so_far[row]]), each[None])
                        .argmax()) for row, each in zip(rows, logits)]
        batch = make_batch(3, top_k=1, seq_rows=rows, repetition_penalty=[penalties[row] for row in rows])
        ids = sample(logits, batch, sampler, resets).token_ids.tolist()
        assert ids == expected
        resets = ()
        for row, token in zip(rows, ids):
            so_far[row].append(token)
    assert len(set(so_far[2])) > len(set(so_far[0])), "the penalised row is the more varied one"


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(4, 25)
    known = np.arange(25) != int(logits[0].argmax())
    batch = make_batch(4, temperature=0.1, top_k=[1, 0, 0, 1], repetition_penalty=5.0, num_logprobs=(2, None, 0, -1),
                       banned=((0, (3,)),))
    out = sample(logits, batch, known_vocab=known, resets=((0, np.arange(25)),))
    assert out.logprobs is not None
    dicts = logprob_dicts(out.logprobs, out.token_ids.tolist())
    expected = logits.log_softmax(-1)
    assert dicts[1] is None
    for row, wanted in ((0, set(expected[0].topk(2).indices.tolist())), (2, set()), (3, set(range(25)))):
        got = dicts[row]
        assert got is not None and set(got) == wanted | {out.token_ids[row].item()}
        for token, value in got.items():
            assert value == pytest.approx(expected[row, token].item(), abs=1e-5)
    assert int(out.token_ids[0]) not in expected[0].topk(1).indices
