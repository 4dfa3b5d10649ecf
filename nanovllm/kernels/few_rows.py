"""Matrix products of a few rows that read their weights once, together with what stands before them in a layer."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import early_launch, starts_early

PLAIN, GATED, NORMED, ADDED = 0, 1, 2, 3    # what the product is of, see `_few_rows_kernel`
# What beat cuBLAS on an H200, see docs/log.md: any product of 2 rows; of more, one of little arithmetic.
ANY_SIZE_ROWS, MIXED_ROWS, PLAIN_ROWS = 2, 4, 8
MANY_PRODUCTS = 4 * 6144 * 1024     # of a row's value and a weight


@dataclass(frozen=True)
class Tiles:
    """How one launch cuts up its work."""

    cols: int           # outputs of one program
    depth: int          # inputs that it loads at once
    warps: int
    early: bool         # programs start while the kernel before them still runs, and wait for it with weights in hand


@triton.jit
def _inputs(x: tl.tensor, other: tl.tensor, gain: tl.tensor, total: tl.tensor, place: tl.tensor, real: tl.tensor,
            row: tl.tensor, x_stride: int, other_stride: int, first: tl.tensor, FORM: tl.constexpr, SIZE: tl.constexpr,
            ) -> tuple[tl.tensor, tl.tensor]:
    """(float32 inputs of the product, the values whose squares a norm sums up), both [rows, 1, places]."""
    value = tl.load(x + row * x_stride + place, mask=real, other=0.0)
    if FORM == 3:
        value += tl.load(other + row * other_stride + place, mask=real, other=0.0)
        tl.store(total + row * SIZE + place, value, mask=real & first)
    wide = value.to(tl.float32)
    inputs = wide
    if FORM == 1:
        factor = tl.load(other + row * other_stride + place, mask=real, other=0.0).to(tl.float32)
        silu = (wide / (1 + tl.exp(-wide))).to(value.dtype).to(tl.float32)      # rounded where the twin rounds
        inputs = (silu * factor).to(value.dtype).to(tl.float32)
    elif FORM >= 2:
        inputs = wide * tl.load(gain + place, mask=place < SIZE, other=0.0).to(tl.float32)
    return inputs, wide


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x: tl.tensor, other: tl.tensor, gain: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor,
    total: tl.tensor, rows: int, x_stride: int, other_stride: int, weight_stride: int, out_features: int, eps: float,
    FORM: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    DEPTH: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """All rows of some columns of a product with x (0), silu(x) * other (1), norm(x) (2) or norm(x + other) (3).

    EARLY: weights are read before the kernel ahead of this one is known to be done, so it must not be what writes them.
    """
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :, None]
    row, place = tl.arange(0, ROWS)[:, None, None], tl.arange(0, DEPTH)[None, None, :]
    first, weights_at = tl.program_id(0) == 0, weight + col.to(tl.int64) * weight_stride + place
    acc = tl.zeros([ROWS, COLS, DEPTH], tl.float32)
    squares = tl.zeros([ROWS, 1, DEPTH], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    weights = tl.load(weights_at, mask=(col < out_features) & (place < SIZE), other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for start in tl.static_range(0, SIZE, DEPTH):
        if start > 0:
            weights = tl.load(weights_at + start, mask=(col < out_features) & (start + place < SIZE), other=0.0)
        inputs, wide = _inputs(x, other, gain, total, start + place, (row < rows) & (start + place < SIZE), row,
                               x_stride, other_stride, first, FORM, SIZE)
        acc += inputs * weights.to(tl.float32)
        if FORM >= 2:
            squares += wide * wide
    result = tl.sum(acc, 2)
    out_row, out_col = tl.arange(0, ROWS)[:, None], tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    if FORM >= 2:       # the norm's divisor comes last: so the weights need not wait for it
        result *= tl.rsqrt(tl.sum(squares, 2) / SIZE + eps)
    if BIAS:
        result += tl.load(bias + out_col, mask=out_col < out_features, other=0.0).to(tl.float32)
    tl.store(out + out_row * out_features + out_col, result.to(out.dtype.element_ty),
             mask=(out_row < rows) & (out_col < out_features))


def beats_library(rows: int, weight: Tensor, plain: bool) -> bool:
    """Whether `linear` (plain), or else the two products behind it, is the faster way to multiply so many rows."""
    few = PLAIN_ROWS if plain else MIXED_ROWS
    return rows <= ANY_SIZE_ROWS or (rows <= few and rows * weight.numel() <= MANY_PRODUCTS)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """`x @ weight.T + bias` of at most `PLAIN_ROWS` rows x `[rows, in_features]`; weight `[out_features, in_features]`.

    Rows of x and of weight are contiguous. Sums are float32. Equal in plain torch: `torch.nn.functional.linear`.
    """
    return _product(PLAIN, x, x, x, 0.0, weight, bias, tiles)[0]


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles | None = None,
                 ) -> Tensor:
    """`linear` of `silu(gate) * up`, both `[rows, in_features]`. Equal in plain torch: `layers.activation`."""
    return _product(GATED, gate, up, gate, 0.0, weight, bias, tiles)[0]


def norm_linear(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None,
                tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """(`linear` of the norm of x + residual, x + residual); no residual: of the norm of x, and x itself.

    gain `[in_features]` are the norm's weights. Equal in plain torch: `layers.norm`, but for the rounding of what lies
    between norm and product: here it is float32.
    """
    if residual is None:
        return _product(NORMED, x, x, gain, eps, weight, bias, tiles)[0], x
    return _product(ADDED, x, residual, gain, eps, weight, bias, tiles)


def tiles_of(x: Tensor, form: int) -> Tiles:
    """The best of `tools/linear_sweep.py` on an H200, see docs/log.md."""
    rows, in_features = x.shape
    if form in (NORMED, ADDED):
        cols, depth, warps = 4, 1024, 2 if rows <= 2 else 4
    elif rows > MIXED_ROWS:
        cols, depth, warps = 2, 512, 2
    else:
        cols, depth, warps = 2 if form == PLAIN else 4 if rows == 1 else 8, 2048, 8
    depth_of_all = max(triton.next_power_of_2(in_features), 16)
    if depth_of_all < depth:            # sizes that were not measured
        cols, depth, warps = 4 if rows <= 2 else 2, depth_of_all, 4 if depth_of_all == 1024 else 1
    return Tiles(cols, depth, warps, starts_early(x))


def _product(form: int, x: Tensor, other: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None,
             tiles: Tiles | None) -> tuple[Tensor, Tensor]:
    (rows, in_features), out_features = x.shape, len(weight)
    assert rows <= PLAIN_ROWS and x.stride(1) == other.stride(1) == weight.stride(1) == gain.stride(-1) == 1
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    total = torch.empty(rows, in_features, dtype=x.dtype, device=x.device) if form == ADDED else out
    tiles = tiles or tiles_of(x, form)
    if rows:
        _few_rows_kernel[(triton.cdiv(out_features, tiles.cols),)](
            x, other, gain, weight, x if bias is None else bias, out, total, rows, x.stride(0), other.stride(0),
            weight.stride(0), out_features, eps, FORM=form, SIZE=in_features, BIAS=bias is not None,
            ROWS=triton.next_power_of_2(rows), COLS=tiles.cols, DEPTH=tiles.depth, EARLY=tiles.early,
            num_warps=tiles.warps, **early_launch(tiles.early))
    return out, total
