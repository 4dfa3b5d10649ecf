"""Scatters the keys and values of new tokens into the slots of a paged cache, in one launch."""
from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:     # no wheel for this platform: then there is no CUDA device either
    triton = None

if triton is not None:

    @triton.jit
    def _store_kv_kernel(
        k: tl.tensor, v: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, slot_mapping: tl.tensor,
        k_token_stride: int, k_head_stride: int, k_dim_stride: int,
        v_token_stride: int, v_head_stride: int, v_dim_stride: int,
        head_dim: tl.constexpr, row_size: tl.constexpr, BLOCK: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            place = tl.arange(0, BLOCK)     # a power of two, so it may be longer than the row
            mask = place < row_size
            head, dim = place // head_dim, place % head_dim
            key = tl.load(k + token * k_token_stride + head * k_head_stride + dim * k_dim_stride, mask=mask)
            value = tl.load(v + token * v_token_stride + head * v_head_stride + dim * v_dim_stride, mask=mask)
            # FlashAttention 3 multiplies what lies behind a sequence in its last block by 0, which must not give NaN.
            value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
            # slot * row_size passes 2^31 in a large cache: both are int64 here
            tl.store(k_cache + slot * row_size + place, key, mask=mask)
            tl.store(v_cache + slot * row_size + place, value, mask=mask)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v `[tokens, kv_heads, head_dim]` (any strides) to row `slot_mapping[i]` of the caches; -1 writes nothing.

    A value that is not finite becomes 0: the request it belongs to shows it elsewhere, and others may read its block.
    Caches: `[blocks, block_size, kv_heads, head_dim]`, contiguous; slot_mapping: int64 `[tokens]`, on the same device.
    Raises RuntimeError where Triton is not installed. Equal in plain torch: `attention.torch_backend.store_kv_torch`.
    """
    if triton is None:
        raise RuntimeError("storing KV on a GPU needs Triton; install it or use device='cpu'")
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and slot_mapping.is_contiguous()
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    row_size = kv_heads * head_dim
    _store_kv_kernel[(tokens,)](
        k, v, k_cache, v_cache, slot_mapping, *k.stride(), *v.stride(),
        head_dim=head_dim, row_size=row_size, BLOCK=triton.next_power_of_2(row_size))
