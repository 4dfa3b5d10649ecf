"""Sampling in one kernel against the sampler's torch version: interpreted on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch

from nanovllm.layers import sampler
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


def check_all_on_cpu() -> None:
    for vocab_size in (50, 4096, 5000, 20_000):
        check_draw(6, vocab_size, False, "cpu")
        check_draw(6, vocab_size, True, "cpu")


def test_interpreted_kernel_equals_the_sampler():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 4096, 151_936])
def test_kernel_equals_the_sampler(vocab_size, filters):
    check_draw(33, vocab_size, filters, "cuda")
