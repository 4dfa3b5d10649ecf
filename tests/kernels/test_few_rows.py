"""Products of a few rows, alone and behind a norm or a gate, against torch: interpreted on the CPU, and on the GPU."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.activation import silu_and_mul
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


def check_all_on_cpu() -> None:
    for rows in (0, 1, 3, 8):
        check_products(rows, (40, 72), torch.float32, "cpu", 2e-5)
    check_products(2, (17, 2100), torch.float16, "cpu", 5e-3)


def test_interpreted_kernel_equals_torch():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (2560, 2048), (100, 200)], ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
def test_kernel_equals_torch(shape, dtype, tolerance):
    for rows in (1, 4, 8):
        check_products(rows, shape, dtype, "cuda", tolerance)
