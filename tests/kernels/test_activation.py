"""The gate kernel against the layer: in Triton's interpreter on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch

from nanovllm.layers.activation import silu_and_mul
from tests.interpreted import run_interpreted


def check_gate(rows: int, size: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    from nanovllm.kernels.activation import silu_and_mul as silu_and_mul_triton

    merged = torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)).mul(4).to(device, dtype)
    gate, up = merged.chunk(2, dim=1)
    out = silu_and_mul_triton(gate, up)
    torch.testing.assert_close(out, silu_and_mul(gate, up), rtol=tolerance, atol=tolerance)


def check_all_on_cpu() -> None:
    for size in (7, 1024, 1100):
        check_gate(3, size, torch.float32, "cpu", 1e-6)
    check_gate(2, 1100, torch.float16, "cpu", 2e-3)
    check_gate(0, 8, torch.float32, "cpu", 0)


def test_interpreted_kernel_equals_the_layer():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [7, 3072, 3420, 11008])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_kernel_equals_the_layer(size, dtype, tolerance):
    check_gate(37, size, dtype, "cuda", tolerance)
