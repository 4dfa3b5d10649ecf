"""Sampling in one kernel against the sampler's torch version: interpreted on the CPU, and on the GPU itself."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.layers import sampler
from nanovllm.plan import SamplingBatch
from nanovllm.runner.inputs import sampling_inputs, stream_keys
from nanovllm.runner.staging import to_device
from tests.interpreted import run_interpreted


def check_draw(n: int, vocab_size: int, filters: bool, device: str) -> None:
    """Equal ids: the noise of both may differ in the last bits, which these seeds never turn into another winner."""
    from nanovllm.kernels.sampling import draw

    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(n, vocab_size, generator=generator).mul(3).to(device)
    logits[:, 1::7] = float("-inf")
    logits[n - 1] = float("nan")
    largest = logits.max(dim=1).values
    keys = torch.randint(-2**31, 2**31, (2, n, 1), generator=generator).to(device, torch.int32)
    temperature = (torch.rand(n, 1, generator=generator) + 0.1).to(device)
    temperature[0] = 1e-5
    top_k, top_p = torch.full((n, 1), 20, device=device), torch.full((n, 1), 0.8, device=device)
    group = sampler.RandomRows(None, temperature, keys, 20 if filters else 0, top_k if filters else None,
                               top_p if filters else None, torch.full((n, 1), -3.0, device=device) if filters else None)
    expected = sampler.draw(logits, largest, group)
    scaled = (logits - largest.unsqueeze(1)) / temperature
    lowest = sampler.lowest_kept(scaled, group) if filters else None
    out = draw(logits, largest, temperature, keys, lowest, group.log_min_p)
    assert torch.equal(out[:-1], expected[:-1])
    assert out[0] == logits[0].argmax() and 0 <= int(out[-1]) < vocab_size


def check_largest(n: int, vocab_size: int, device: str) -> None:
    from nanovllm.kernels.sampling import largest

    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    logits[0], logits[1], logits[2, vocab_size // 2] = float("-inf"), 1.5, float("nan")
    values, ids = largest(logits)
    expected = logits.max(dim=1)
    assert torch.equal(values.nan_to_num(9), expected.values.nan_to_num(9))
    rest = [row for row in range(n) if row != 2]
    assert torch.equal(ids[rest], expected.indices[rest]) and 0 <= int(ids[2]) < vocab_size


def mass_kept(scaled: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    weights = scaled.double().exp()
    return (weights * (scaled >= lowest)).sum(1) / weights.sum(1)


def check_lowest_kept(vocab_size: int, device: str) -> None:
    """Rows of every kind of filter; equals lie on the border of each, and rows with fewer finite values than k.

    Equal values, save where a large row's sums, rounded in another order, pass top-p's bound one value apart.
    """
    from nanovllm.kernels.sampling import lowest_kept

    generator = torch.Generator().manual_seed(vocab_size)
    filters = [(k, p) for k in (1, 2, 20, vocab_size - 1, vocab_size) for p in (1.0, 0.95, 0.3, 1e-6)]
    for step in (0.0, 0.5):     # a step of 0.5 between values makes many equal
        scaled = torch.randn(len(filters), vocab_size, generator=generator).mul(4)
        scaled = scaled if step == 0 else (scaled / step).round() * step
        scaled[:, ::3] = float("-inf")
        scaled = (scaled - scaled.max(dim=1, keepdim=True).values).to(device)
        top_k = torch.tensor([[k] for k, _ in filters], device=device)
        top_p = torch.tensor([[p] for _, p in filters], device=device)
        group = sampler.RandomRows(None, top_p, top_k, vocab_size, top_k, top_p, None)
        ours, expected = lowest_kept(scaled, top_k, top_p), sampler.lowest_kept(scaled, group)
        exact = (top_p == 1) | (vocab_size < 1000)
        assert torch.equal(ours[exact], expected[exact])
        assert (mass_kept(scaled, ours) - mass_kept(scaled, expected)).abs().max() < (1e-4 if step == 0 else 5e-2)


def check_plain_draws(n: int, vocab_size: int, unknown: list[int], dtype: torch.dtype, device: str) -> None:
    """What decode graphs sample is what the whole sampler does: greedy and random rows, masked ids, bad rows."""
    from nanovllm.attention.fused import TritonOps

    index, rng = np.arange(n), np.random.default_rng(n)
    known = ~np.isin(np.arange(vocab_size), unknown)
    whole = sampler.Sampler(vocab_size, n, known, torch.device(device), TritonOps())
    ones = np.ones(n, np.float32)
    batch = SamplingBatch(temperature=np.linspace(0.1, 3, n, dtype=np.float32), top_k=(index % 3 == 0).astype(np.int64),
                          top_p=ones, min_p=0 * ones, seed=index % 7, token_index=index, repetition_penalty=ones,
                          seq_rows=index)
    logits = torch.from_numpy(rng.standard_normal((n, vocab_size), np.float32)).mul(3).to(device, dtype)
    logits[:, unknown] = 50.0
    logits[1], logits[3] = float("-inf"), float("nan")
    before = logits.clone()
    ids, finite = whole.draw_plainly(
        logits, torch.from_numpy(batch.temperature)[:, None].to(device),
        torch.from_numpy(stream_keys(batch.seed, batch.token_index)).to(device),
        torch.from_numpy(batch.top_k == 1).to(device, torch.int32))
    expected = whole(logits.to(torch.float32, copy=True), to_device(
        sampling_inputs(batch, (), vocab_size), torch.device(device)))
    assert torch.equal(ids, expected.token_ids) and torch.equal(finite, expected.finite)
    assert finite.tolist() == [row not in (1, 3) for row in range(n)] and not set(ids.tolist()) & set(unknown) - {0}
    assert len(set(ids.tolist())) > n // 2 and torch.equal(logits.nan_to_num(), before.nan_to_num())


def check_equals(device: str) -> None:
    """A greedy row takes the first of equals, in whatever chunks they lie, and one chunk may be all -inf; a temperature
    near 0 comes to the largest logit from every chunk."""
    from nanovllm.kernels.sampling import sample

    logits = torch.full((4, 9000), float("-inf"))
    logits[0, [4095, 4096, 8999]] = -3.25
    logits[1, [8500, 8501]] = 1e30
    logits[2, 5000:] = torch.linspace(-5, 5, 4000)
    logits[3, 17], logits[3, 8200] = 2.0, float("inf")
    temperature, keys = torch.full((4, 1), 1.1e-10), torch.arange(8, dtype=torch.int32).view(2, 4, 1)
    greedy = torch.tensor([1, 1, 0, 0], dtype=torch.int32)
    ids, finite = sample(*(x.to(device) for x in (logits, temperature, keys, greedy)))
    assert ids.tolist() == [4095, 8500, 8999, 0] and finite.tolist() == [True, True, True, False]


def check_many_draws(n: int, device: str) -> None:
    """Winners of an even field, where every value of the noise takes part; all but a few as torch has them."""
    from nanovllm.kernels.sampling import draw, sample

    generator = torch.Generator().manual_seed(n)
    logits = torch.rand(n, 100, generator=generator).to(device)
    keys = torch.randint(-2**31, 2**31, (2, n, 1), generator=generator).to(device, torch.int32)
    temperature = (torch.rand(n, 1, generator=generator) + 0.5).to(device)
    largest, group = logits.max(dim=1).values, sampler.RandomRows(None, temperature, keys, 0, None, None, None)
    expected = sampler.draw(logits, largest, group)
    assert len(set(expected.tolist())) > 50
    sampled, _ = sample(logits, temperature, keys, torch.zeros(n, dtype=torch.int32, device=device))
    for ids in (sampled, draw(logits, largest, temperature, keys, None, None)):
        assert (ids != expected).float().mean() < 1e-3


def check_all_on_cpu() -> None:
    check_many_draws(150, "cpu")
    check_largest(4, 5000, "cpu")
    check_lowest_kept(300, "cpu")
    for vocab_size in (50, 4096, 5000):
        check_draw(6, vocab_size, False, "cpu")
        check_draw(6, vocab_size, True, "cpu")
    for unknown in ([], [298, 299], [5, 70]):
        check_plain_draws(12, 300, unknown, torch.float32, "cpu")
    check_plain_draws(12, 9000, [*range(4096, 8192)], torch.float32, "cpu")
    check_equals("cpu")


def test_interpreted_kernels_equal_the_sampler():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 4096, 151_936])
def test_kernel_equals_the_sampler(vocab_size, filters):
    check_draw(33, vocab_size, filters, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [50, 151_936])
def test_largest_and_lowest_kept(vocab_size):
    check_largest(33, vocab_size, "cuda")
    check_lowest_kept(vocab_size, "cuda")


@pytest.mark.gpu
def test_many_draws_equal_the_samplers():
    check_many_draws(100_000, "cuda")


@pytest.mark.gpu
def test_equals():
    check_equals("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unknown", [[], [*range(151_643, 151_936)], [5, 70]], ids=len)
def test_plain_draws_are_those_of_the_whole_sampler(unknown, dtype):
    check_plain_draws(64, 151_936, unknown, dtype, "cuda")
