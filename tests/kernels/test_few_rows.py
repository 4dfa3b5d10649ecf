"""Products of a few rows, alone and behind a norm or a gate, against torch: interpreted on the CPU, and on the GPU."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.activation import GatedMLP, silu_and_mul
from nanovllm.layers.norm import RMSNorm
from tests.interpreted import run_interpreted

EPS = 1e-6


def check_products(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: str, tolerance: float) -> None:
    from nanovllm.kernels.few_rows import gated_linear, linear, norm_linear

    generator = torch.Generator().manual_seed(rows)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    x, other = draw(rows, 2 * shape[1] + 8).split((shape[1], shape[1] + 8), dim=1)      # rows apart
    other = other[:, :shape[1]]
    weight, bias, gain = (draw(*shape) / shape[1] ** 0.5).to(dtype), draw(shape[0]), draw(shape[1])

    def close(out: Tensor, inputs: Tensor, bias: Tensor | None) -> None:
        wanted = F.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)

    close(linear(x, weight, bias), x, bias)
    close(linear(x, weight, None), x, None)
    close(gated_linear(x, other, weight, None), silu_and_mul(x, other), None)
    for residual in (None, other):
        total = x if residual is None else x + residual
        out, given = norm_linear(x, residual, gain, EPS, weight, bias)
        assert torch.equal(given, total)
        close(out, F.rms_norm(total.float(), shape[1:], gain.float(), EPS), bias)


def check_feed_forward(rows: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """A block whose products go to the kernel, to the library, or to either after the gate, by the number of rows."""
    from nanovllm.attention.fused import TritonOps

    generator, norm = torch.Generator().manual_seed(rows), RMSNorm(64, EPS).to(device, dtype)
    plain, fused = (GatedMLP(64, 96, bias=True, fused=ops).to(device, dtype) for ops in (None, TritonOps()))
    for own, other in zip(plain.parameters(), fused.parameters(), strict=True):
        own.copy_(torch.randn(own.shape, generator=generator) / 8)
        other.copy_(own)
    norm.weight.fill_(1.5)
    x, residual = torch.randn(2, rows, 64, generator=generator).to(device, dtype)
    for out, wanted in zip(fused.forward_normed(norm, x, residual), plain.forward_normed(norm, x, residual)):
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


def test_few_rows_of_little_arithmetic_beat_the_library():
    pytest.importorskip("triton")
    from nanovllm.kernels.few_rows import beats_library

    down, head = torch.empty(1024, 3072, device="meta"), torch.empty(151_936, 1024, device="meta")
    assert [rows for rows in range(1, 12) if beats_library(rows, down, plain=True)] == [*range(1, 9)]
    assert [rows for rows in range(1, 12) if beats_library(rows, down, plain=False)] == [1, 2, 3, 4]
    assert [rows for rows in range(1, 12) if beats_library(rows, head, plain=True)] == [1, 2]


def check_all_on_cpu() -> None:
    for rows in (2, 4, 5, 8, 9):
        check_feed_forward(rows, torch.float32, "cpu", 1e-5)
    for rows in (0, 1, 3, 8):
        check_products(rows, (40, 72), torch.float32, "cpu", 2e-5)
    check_products(2, (17, 2100), torch.float16, "cpu", 5e-3)


def test_interpreted_kernel_equals_torch():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (2560, 2048), (100, 200)], ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_kernel_equals_torch(shape, dtype, tolerance):
    for rows in (2, 4, 5, 8, 9):
        check_feed_forward(rows, dtype, "cuda", tolerance)
    for rows in (1, 4, 8):
        check_products(rows, shape, dtype, "cuda", tolerance)
