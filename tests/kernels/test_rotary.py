"""Rotation, and norm, rotation and store in one pass, against the layers: interpreted on the CPU, and on the GPU."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.attention.torch_backend import store_kv_torch
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding, apply_rotary
from nanovllm.model_config import RopeConfig
from tests.interpreted import run_interpreted

SHAPES = [(4, 2, 64), (7, 1, 80), (3, 3, 96), (28, 4, 128), (2, 2, 16)]     # heads, KV heads, head_dim


def draw_rotation(tokens: int, half: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    angles = torch.randn(tokens, half, generator=generator).mul(50).to(device)
    return angles.cos(), angles.sin()


def check_rotation(axes: int, half: int, factor: float, device: str, tolerance: float) -> None:
    from nanovllm.attention.fused import TritonOps

    sections = None if axes == 1 else (half - 5, 3, 2)
    plain, fused = (RotaryEmbedding(RopeConfig("default", 1e6, sections, attention_factor=factor), 2 * half, ops)
                    .to(device) for ops in (None, TritonOps()))
    generator = torch.Generator().manual_seed(half)
    positions = torch.randint(0, 130_000, (axes, 15), generator=generator).to(device)[:, 2:]       # rows apart
    for out, wanted in zip(fused(positions), plain(positions), strict=True):
        assert out.shape == (13, half) and out.dtype == torch.float32
        torch.testing.assert_close(out, wanted, rtol=0, atol=tolerance)


def check_rotate(heads: int, dim: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    from nanovllm.kernels.rotary import rotate

    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(5, heads + 2, dim, generator=generator).to(device, dtype)
    rotation, expected = draw_rotation(5, dim // 2, generator, device), x.clone()
    expected[:, 1:-1] = apply_rotary(x[:, 1:-1], rotation)
    rotate(x[:, 1:-1], *rotation)
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def check_one_pass(heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype, device: str,
                   tolerance: float) -> None:
    from nanovllm.kernels.rotary import norm_rotate_store

    generator = torch.Generator().manual_seed(heads * dim)
    slots = torch.tensor([11, -1, 0, 7, -1, 4, 5], device=device)
    merged = torch.randn(7, (heads + 2 * kv_heads) * dim + 8, generator=generator).to(device, dtype)
    qkv = merged[:, 8:].unflatten(1, (-1, dim))
    rotation, norms = draw_rotation(7, dim // 2, generator, device), [RMSNorm(dim, 1e-6) for _ in range(2)]
    for layer in norms:
        layer.to(device, dtype).weight.copy_(torch.randn(dim, generator=generator))
    caches, expected = (torch.full((2, 3, 4, kv_heads, dim), 9.0, dtype=dtype, device=device) for _ in range(2))
    weights = (norms[0].weight, norms[1].weight, 1e-6) if norm else None
    out = norm_rotate_store(qkv, *rotation, weights, caches[0], caches[1], slots)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if norm:
        q, k = norms[0](q), norms[1](k)
    store_kv_torch(apply_rotary(k, rotation), v, expected[0], expected[1], slots)
    torch.testing.assert_close(out, apply_rotary(q, rotation), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(caches, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(caches[1], expected[1]), "values are copied"


def check_all_on_cpu() -> None:
    check_rotation(1, 64, 1.0, "cpu", 1e-6)
    check_rotation(3, 40, 1.25, "cpu", 1e-6)
    for heads, kv_heads, dim in SHAPES:
        check_rotate(heads, dim, torch.float32, "cpu", 1e-5)
        for norm in (False, True):
            check_one_pass(heads, kv_heads, dim, norm, torch.float32, "cpu", 1e-5)
    check_rotate(2, 80, torch.float16, "cpu", 4e-3)
    check_one_pass(4, 2, 80, True, torch.float16, "cpu", 4e-3)


def test_interpreted_kernels_equal_the_layers():
    run_interpreted(__name__, "check_all_on_cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_the_layers(shape, dtype, tolerance):
    heads, kv_heads, dim = shape
    check_rotation(1, dim // 2, 1.25, "cuda", 1e-6)
    check_rotation(3, dim // 2, 1.0, "cuda", 1e-6)
    check_rotate(heads, dim, dtype, "cuda", tolerance)
    for norm in (False, True):
        check_one_pass(heads, kv_heads, dim, norm, dtype, "cuda", tolerance)
