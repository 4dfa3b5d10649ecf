"""The KV move kernel against the runner's torch version: interpreted on the CPU, and on the GPU itself."""
from __future__ import annotations

import pytest
import torch

from nanovllm.plan import KVCopy
from nanovllm.runner import kv_cache
from nanovllm.runner.staging import to_device
from tests.interpreted import run_interpreted

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 9, 3


def check_move(kv_heads: int, dim: int, delta: int, first_rows: tuple[int, ...], dtype: torch.dtype, device: str,
               tolerance: float) -> None:
    from nanovllm.kernels.kv_move import move_kv

    generator = torch.Generator().manual_seed(dim)
    pool = torch.randn(LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim, generator=generator).to(device, dtype)
    inv_freq = torch.rand(dim // 2, generator=generator)
    copy = KVCopy((1, 0, 7), 2, (3, 8, 2, 5), 5, 9, delta, first_rows)
    expected = pool.clone()
    kv_cache.move_kv(expected, [copy], inv_freq)
    sources, targets = (
        torch.from_numpy(kv_cache.block_slots(blocks, start, start + 9, BLOCK_SIZE)).to(device)
        for blocks, start in ((copy.source_blocks, copy.source_start), (copy.target_blocks, copy.target_start)))
    rows = torch.tensor(first_rows, device=device).expand(LAYERS).contiguous()
    before = pool.clone()
    move_kv(pool.view(LAYERS, 2, -1, kv_heads, dim), sources, targets, rows,
            to_device(kv_cache.rotation_by(delta, inv_freq), pool.device) if delta else None)
    torch.testing.assert_close(pool, expected, rtol=tolerance, atol=tolerance)
    assert not torch.equal(pool, before)
    if not delta:
        assert torch.equal(pool, expected), "a copy is exact"


def check_all_on_cpu() -> None:
    for kv_heads, dim in ((1, 64), (2, 80), (3, 96), (2, 128)):
        check_move(kv_heads, dim, -1000, (2, 9, 0), torch.float32, "cpu", 1e-5)
        check_move(kv_heads, dim, 0, (1,), torch.float16, "cpu", 0)
    check_move(2, 80, 77, (0,), torch.float16, "cpu", 4e-3)


def test_interpreted_kernel_equals_the_runner():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("delta", [-1000, 0, 7])
def test_kernel_equals_the_runner(dim, delta):
    check_move(2, dim, delta, (0,), torch.float32, "cuda", 1e-5)
    check_move(2, dim, delta, (2, 9, 0), torch.bfloat16, "cuda", 2e-2)
