"""Matrix products of a few rows, bound by reading the weights once, which libraries do not read at full speed."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16       # of the input; one tile of the tensor cores
FAST_ROWS = 4       # up to which it beat cuBLAS on an H200, see docs/log.md
COLS = 16           # outputs of one program


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: int, x_stride: int, weight_stride: int,
    out_features: int, in_features: int, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """All rows of some columns of the output."""
    row, col, place = tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    real_row, real_col = (row < rows)[:, None], (col < out_features)[:, None]
    x_rows = x + row[:, None] * x_stride + place[None, :]
    weight_rows = weight + col.to(tl.int64)[:, None] * weight_stride + place[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(0, in_features, DEPTH):
        inside = (start + place < in_features)[None, :]
        inputs = tl.load(x_rows + start, mask=real_row & inside, other=0.0)
        weights = tl.load(weight_rows + start, mask=real_col & inside, other=0.0)
        acc = tl.dot(inputs, tl.trans(weights), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + col, mask=col < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_features + col[None, :], acc.to(out.dtype.element_ty),
             mask=real_row & (col < out_features)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of at most `MAX_ROWS` rows x `[rows, in_features]`; weight `[out_features, in_features]`.

    Rows of x and of weight are contiguous. Sums are float32. Equal in plain torch: `torch.nn.functional.linear`.
    """
    (rows, in_features), out_features = x.shape, len(weight)
    assert rows <= MAX_ROWS and x.stride(1) == weight.stride(1) == 1
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows:
        _linear_kernel[(triton.cdiv(out_features, COLS),)](
            x, weight, x if bias is None else bias, out, rows, x.stride(0), weight.stride(0), out_features,
            in_features, BIAS=bias is not None, ROWS=MAX_ROWS, COLS=COLS, DEPTH=256 if x.element_size() == 2 else 64,
            num_warps=4, num_stages=4)
    return out
