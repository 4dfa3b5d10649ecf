"""The norm kernels against the layer: in Triton's interpreter on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch

from nanovllm.layers.norm import RMSNorm
from tests.interpreted import run_interpreted


def check_norm(rows: int, size: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    from nanovllm.kernels.norm import add_rms_norm, rms_norm

    generator = torch.Generator().manual_seed(size)
    merged = torch.randn(rows, 2 * size + 16, generator=generator).mul(3).to(device, dtype)
    layer = RMSNorm(size, 1e-6).to(device, dtype)
    layer.weight.copy_(torch.randn(size, generator=generator))
    x, residual = merged[:, :size], merged[:, 16 + size:]       # views of longer rows
    torch.testing.assert_close(rms_norm(x, layer.weight, 1e-6), layer(x), rtol=tolerance, atol=tolerance)
    expected, expected_total = layer.add_and_norm(x, residual)
    normed, total = add_rms_norm(x, residual, layer.weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


def check_all_on_cpu() -> None:
    for size in (16, 80, 1024):
        check_norm(3, size, torch.float32, "cpu", 1e-6)
        check_norm(2, size, torch.float16, "cpu", 2e-3)
    check_norm(0, 16, torch.float32, "cpu", 0)


def test_interpreted_kernels_equal_the_layer():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 80, 1024, 1280, 2048, 5120])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_kernels_equal_the_layer(size, dtype, tolerance):
    check_norm(37, size, dtype, "cuda", tolerance)
