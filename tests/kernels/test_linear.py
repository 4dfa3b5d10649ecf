"""The product of a few rows against torch's: in Triton's interpreter on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.interpreted import run_interpreted


def check_linear(rows: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: str,
                 tolerance: float) -> None:
    from nanovllm.kernels.linear import linear

    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, shape[1] + 8, generator=generator).to(device, dtype)
    x = wide[:, :shape[1]]          # rows apart, as those of a merged projection are
    weight = torch.randn(*shape, generator=generator).div(shape[1] ** 0.5).to(device, dtype)
    b = torch.randn(shape[0], generator=generator).to(device, dtype) if bias else None
    expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
    torch.testing.assert_close(linear(x, weight, b).float(), expected, rtol=tolerance, atol=tolerance)


def check_all_on_cpu() -> None:
    for rows in (0, 1, 3, 16):
        check_linear(rows, (40, 72), rows == 3, torch.float32, "cpu", 1e-5)
    check_linear(2, (17, 300), True, torch.float16, "cpu", 2e-3)


def test_interpreted_kernel_equals_torch():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (2560, 2048), (6144, 1024), (100, 200)], ids=str)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_kernel_equals_torch(shape, dtype, tolerance):
    for rows in (1, 5, 16):
        check_linear(rows, shape, rows == 5, dtype, "cuda", tolerance)
