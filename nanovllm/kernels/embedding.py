"""Embeddings of a decode step's ids, some of which only the device knows yet."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed_kernel(
    token_ids: tl.tensor, fed: tl.tensor, last_ids: tl.tensor, weight: tl.tensor, out: tl.tensor, weight_stride: int,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:
    row, place = tl.program_id(0), tl.arange(0, WIDTH)
    source = tl.load(fed + row)
    token = tl.load(last_ids + source, mask=source >= 0, other=0)
    token = tl.where(source >= 0, token, tl.load(token_ids + row))
    values = tl.load(weight + token * weight_stride + place, mask=place < SIZE, other=0.0)     # in int64: passes 2^31
    tl.store(out + row.to(tl.int64) * SIZE + place, values, mask=place < SIZE)


def embed(token_ids: Tensor, fed: Tensor, last_ids: Tensor, weight: Tensor) -> Tensor:
    """`[tokens, size]`: contiguous rows of weight `[vocab, size]` for the ids `last_ids[fed]`, or `token_ids` where
    `fed` is -1; all int64, token_ids and fed `[tokens]`, last_ids `[batch rows]`.

    Equal in plain torch: `runner.cuda_graph.fed_ids` and `torch.nn.functional.embedding`.
    """
    tokens, size = len(token_ids), weight.shape[1]
    assert weight.stride(1) == 1
    out = torch.empty(tokens, size, dtype=weight.dtype, device=weight.device)
    if tokens:
        width = triton.next_power_of_2(size)
        _embed_kernel[(tokens,)](token_ids, fed, last_ids, weight, out, weight.stride(0), SIZE=size,
                                 WIDTH=width, num_warps=min(max(width // 512, 1), 8))
    return out
