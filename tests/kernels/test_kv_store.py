"""The KV store kernel against its torch twin: in Triton's interpreter on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch

from nanovllm.attention.torch_backend import store_kv_torch
from nanovllm.kernels.kv_store import store_kv
from tests.interpreted import run_interpreted, run_python

SHAPES = [(kv_heads, dim) for kv_heads in (1, 2, 3, 6) for dim in (64, 80, 96, 128)]
HUGE_SLOTS, HUGE_ROW = 2_097_153, (8, 128)      # the last slot begins at value 2^31 of the cache


def check_store(kv_heads: int, dim: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """The kernel and the twin leave equal caches, for views of one merged projection and for contiguous inputs."""
    generator = torch.Generator().manual_seed(kv_heads * dim)
    merged = torch.randn(7, 2 + 2 * kv_heads, dim, generator=generator).to(device, dtype)
    slots = torch.tensor([11, -1, 0, 7, -1, 4, 5], device=device)
    views = merged[:, 2 : 2 + kv_heads], merged[:, 2 + kv_heads :]
    transposed = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in views)
    for k, v in (views, tuple(x.contiguous() for x in views), transposed):
        caches, expected = (torch.full((2, 3, 4, kv_heads, dim), 9.0, dtype=dtype, device=device) for _ in range(2))
        store_kv(k, v, caches[0], caches[1], slots)
        store_kv_torch(k, v, expected[0], expected[1], slots)
        assert torch.equal(caches, expected)
        store_kv(k[:0], v[:0], caches[0], caches[1], slots[:0])
        assert torch.equal(caches, expected)


def check_huge_cache(device: str) -> None:
    """The slot whose offset passes 2^31 is written, with 4 GiB of cache: K and V are one, of equal rows."""
    cache = torch.empty(HUGE_SLOTS, 1, *HUGE_ROW, dtype=torch.bfloat16, device=device)
    row = torch.arange(1024, device=device).view(1, *HUGE_ROW).to(torch.bfloat16)
    store_kv(row, row, cache, cache, torch.tensor([HUGE_SLOTS - 1], device=device))
    assert torch.equal(cache[-1], row)


def check_not_finite(device: str) -> None:
    """Values that would poison the next reader of a block are stored as 0; keys, which a mask replaces, as they are."""
    caches = torch.ones(2, 1, 2, 1, 16, device=device)
    row = torch.tensor([float("nan"), float("inf"), float("-inf"), 3.0] * 4, device=device).view(1, 1, 16)
    store_kv(row, row, caches[0], caches[1], torch.tensor([1], device=device))
    torch.testing.assert_close(caches[0, 0, 1], row[0], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(caches[1, 0, 1], row[0].nan_to_num(0.0, 0.0, 0.0)) and (caches[:, 0, 0] == 1).all()


def check_all_on_cpu() -> None:
    for kv_heads, dim in SHAPES:
        check_store(kv_heads, dim, "cpu", torch.float32)
    check_store(3, 80, "cpu", torch.float16)
    check_not_finite("cpu")
    check_huge_cache("cpu")     # memory that is never touched costs nothing


def test_interpreted_kernel_equals_its_twin():
    run_interpreted(__name__, "check_all_on_cpu")


def test_module_can_be_imported_without_triton():
    run_python("""
import sys, torch
sys.modules["triton"] = None
from nanovllm.kernels.kv_store import store_kv
from tests.interpreted import run_interpreted, run_python
x = torch.zeros(1, 1, 4)
try:
    store_kv(x, x, x[None], x[None], torch.zeros(1, dtype=torch.int64))
except RuntimeError as error:
    assert "Triton" in str(error)
else:
    raise SystemExit("no error")
""")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads,dim", SHAPES)
def test_kernel_equals_its_twin(kv_heads, dim):
    check_store(kv_heads, dim, "cuda")


@pytest.mark.gpu
def test_values_that_are_not_finite():
    check_not_finite("cuda")


@pytest.mark.gpu
def test_slots_beyond_two_to_the_31_values():
    check_huge_cache("cuda")
