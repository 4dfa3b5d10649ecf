"""RMSNorm against its definition and the rounding order of transformers."""
from __future__ import annotations

import torch
from torch import nn

from nanovllm.layers.norm import RMSNorm


def make_norm(size: int, eps: float, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, eps)
    weight = 1 + torch.randn(size, generator=torch.Generator().manual_seed(0)) / 4
    norm.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return norm


def test_equals_the_definition():
    norm, x = make_norm(48, 1e-3, torch.float32), torch.randn(5, 2, 48) / 30
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_bfloat16_rounds_before_the_weight():
    norm, x = make_norm(48, 1e-6, torch.bfloat16), torch.randn(5, 48).bfloat16()
    wide = x.float()
    quotient = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm(x), norm.weight * quotient)


def test_float16_squares_do_not_overflow():
    norm = make_norm(16, 1e-6, torch.float16)
    assert norm(torch.full((1, 16), 6e4, dtype=torch.float16)).isfinite().all()


def test_residual_stream_is_the_sum():
    norm, x, residual = make_norm(48, 1e-6, torch.float32), torch.randn(5, 48), torch.randn(5, 48)
    normed, stream = norm.add_and_norm(x, residual)
    assert torch.equal(stream, x + residual) and torch.equal(normed, norm(stream))
    normed, stream = norm.add_and_norm(x, None)
    assert torch.equal(stream, x) and torch.equal(normed, norm(x))
