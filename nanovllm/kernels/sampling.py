"""What sampling does with rows of logits, the maximum, top-k and top-p, and the draw, without a word to the host."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.early import await_inputs, early_launch, starts_early

CHUNK = 4096        # ids that one program looks at
RANKED_CHUNK = 4096     # ids that one turn of the loop over a whole row looks at


@triton.jit
def _race(scaled: tl.tensor, ids: tl.tensor, key: tl.tensor, other_key: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """For each id a value that is largest where `scaled` + Gumbel noise is: -(e / exp(scaled)), where -log(e) is that
    noise, so e an exponential variable; at most 0, and one logarithm for two.

    The bits are those of `layers.sampler.uniform_bits`. FAST: the device's log2, off by 2^-22 of 1 (PTX ISA,
    lg2.approx), which a series replaces where that is much of e: either way some 2^-20 of the value.
    """
    x = ids.to(tl.uint32) * 0x9E3779B1 + key
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x += other_key
    x *= 0x735A2D97
    x ^= x >> 15
    x *= 0x9E485565
    x ^= x >> 16
    u = (x >> 8).to(tl.float32) * 0.000000059604644775390625                      # 2^-24
    u += ((x & 0xFF).to(tl.float32) + 0.5) * 0.00000000023283064365386962890625   # 2^-32
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    rest = tl.maximum(1 - u, 0.000000059604644775390625)
    if FAST:
        by_log = -0.6931471805599453 * tl.extra.cuda.libdevice.fast_log2f(rest)
    else:
        by_log = -tl.log(rest)
    return -tl.where(u < 0.125, series, by_log) * tl.exp(-scaled)


@triton.jit
def _store_winner(best: tl.tensor, best_ids: tl.tensor, out: tl.tensor, values: tl.tensor, ids: tl.tensor,
                  vocab_size: int) -> None:
    """The largest of `values` and the first id that has it; a reduction of pairs would take twice the arithmetic."""
    value = tl.max(values, 0)
    tl.store(best + out, value)
    tl.store(best_ids + out, tl.min(tl.where(values == value, ids, vocab_size - 1), 0))


@triton.jit
def _draw_kernel(
    logits: tl.tensor, largest: tl.tensor, temperature: tl.tensor, keys: tl.tensor, lowest: tl.tensor,
    log_min_p: tl.tensor, best: tl.tensor, best_ids: tl.tensor, vocab_size: int, stride: int,
    RANKED: tl.constexpr, MIN_P: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr, FAST: tl.constexpr,
) -> None:
    """The winner of one chunk of ids."""
    await_inputs(EARLY)
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = ids < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    below, heat = logit - tl.load(largest + row), tl.load(temperature + row)
    if RANKED or MIN_P:     # rounded like the twin's quotient, since a filter's bound is one of these values
        scaled = tl.div_rn(below, heat)
    else:
        scaled = below * (1 / heat)
    if RANKED:
        scaled = tl.where(scaled < tl.load(lowest + row), float("-inf"), scaled)
    if MIN_P:
        scaled = tl.where(scaled < tl.load(log_min_p + row), float("-inf"), scaled)
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    other_key = tl.load(keys + tl.num_programs(0) + row).to(tl.uint32, bitcast=True)
    drawn = _race(scaled, ids, key, other_key, FAST)
    _store_winner(best, best_ids, row * tl.num_programs(1) + chunk, tl.where(drawn == drawn, drawn, float("-inf")),
                  ids, vocab_size)      # NaN never wins


@triton.jit
def _sample_kernel(
    logits: tl.tensor, temperature: tl.tensor, keys: tl.tensor, greedy: tl.tensor, best: tl.tensor, peaks: tl.tensor,
    best_ids: tl.tensor, vocab_size: int, stride: int, CHUNK: tl.constexpr, EARLY: tl.constexpr, FAST: tl.constexpr,
) -> None:
    """The winner of one chunk of ids, by the logit or the draw relative to the chunk's largest logit, and that logit
    (`peaks`): NaN if there is one."""
    await_inputs(EARLY)
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    peak = tl.max(tl.where(logit == logit, logit, float("-inf")), 0)
    drawn = logit - tl.where(peak == float("-inf"), 0.0, peak)
    if tl.load(greedy + row) == 0:
        key = tl.load(keys + row).to(tl.uint32, bitcast=True)
        other_key = tl.load(keys + tl.num_programs(0) + row).to(tl.uint32, bitcast=True)
        drawn = _race(drawn * (1 / tl.load(temperature + row)), ids, key, other_key, FAST)
    out = row * tl.num_programs(1) + chunk
    _store_winner(best, best_ids, out, tl.where(drawn == drawn, drawn, float("-inf")), ids, vocab_size)
    has_nan = tl.max((logit != logit).to(tl.int32), 0) > 0
    tl.store(peaks + out, tl.where(has_nan, float("nan"), peak))


@triton.jit
def _pick_sample_kernel(
    best: tl.tensor, peaks: tl.tensor, best_ids: tl.tensor, temperature: tl.tensor, greedy: tl.tensor,
    token_ids: tl.tensor, finite: tl.tensor, chunks: int, WIDTH: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """The winner of a row's chunks, the first one of equals; id 0 for a row that is not finite."""
    await_inputs(EARLY)
    row, chunk = tl.program_id(0), tl.arange(0, WIDTH)
    at = row * chunks + chunk
    peak = tl.load(peaks + at, mask=chunk < chunks, other=float("-inf"))
    largest = tl.max(tl.where(peak == peak, peak, float("-inf")), 0)
    is_finite = (tl.max((peak != peak).to(tl.int32), 0) == 0) & (tl.abs(largest) < float("inf"))
    value = tl.load(best + at, mask=chunk < chunks, other=float("-inf"))
    if tl.load(greedy + row) == 0:
        value *= tl.exp((largest - peak) * (1 / tl.load(temperature + row)))
    else:
        value -= largest - peak
    winner = tl.argmax(tl.where(value == value, value, float("-inf")), 0)
    token_id = tl.load(best_ids + row * chunks + tl.minimum(winner, chunks - 1))
    tl.store(token_ids + row, tl.where(is_finite, token_id, 0))
    tl.store(finite + row, is_finite)


@triton.jit
def _largest_kernel(logits: tl.tensor, best: tl.tensor, best_ids: tl.tensor, vocab_size: int, stride: int,
                    CHUNK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """The largest logit of one chunk of ids; NaN if there is one."""
    await_inputs(EARLY)
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    out = row * tl.num_programs(1) + chunk
    _store_winner(best, best_ids, out, tl.where(logit == logit, logit, float("-inf")), ids, vocab_size)
    if tl.max((logit != logit).to(tl.int32), 0) > 0:
        tl.store(best + out, float("nan"))


@triton.jit
def _pick_kernel(best: tl.tensor, best_ids: tl.tensor, token_ids: tl.tensor, largest: tl.tensor, chunks: int,
                 WIDTH: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr) -> None:
    """The winner of a row's chunks, the first one of equals, and its value; NaN if there is one."""
    await_inputs(EARLY)
    row, chunk = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    value, winner = tl.max(tl.where(values == values, values, float("-inf")), 0, return_indices=True)
    tl.store(token_ids + row, tl.load(best_ids + row * chunks + winner).to(tl.int64))
    if LARGEST:
        has_nan = tl.max((values != values).to(tl.int32), 0) > 0
        tl.store(largest + row, tl.where(has_nan, float("nan"), value))


@triton.jit
def _lower_bound(row: tl.tensor, vocab_size: int, wanted: tl.tensor, COUNT: tl.constexpr,
                 CHUNK: tl.constexpr) -> tl.tensor:
    """The largest float of which the values of `row` that reach it number, or sum in exp(value) to, `wanted` or more.

    Floats are searched by their bits, two from the top a pass, in an order that unsigned integers share.
    """
    found, level = tl.zeros([1], tl.uint32), tl.arange(0, 4).to(tl.uint32)
    for step in range(0, 32, 2):
        bounds = found | (level << (30 - step))
        reached = tl.zeros([4, CHUNK], tl.float32)
        for first in range(0, vocab_size, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            value = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf"))
            bits = value.to(tl.uint32, bitcast=True)
            key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
            weight = (ids < vocab_size).to(tl.float32) if COUNT else tl.exp(value)
            reached += tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0.0)
        enough = (tl.sum(reached, 1) >= wanted).to(tl.uint32)
        found = found | ((tl.maximum(tl.sum(enough, 0), 1) - 1) << (30 - step)).to(tl.uint32)
    bits = tl.where((found >> 31) == 1, found & 0x7FFFFFFF, found ^ 0xFFFFFFFF)
    return tl.max(bits.to(tl.float32, bitcast=True), 0)


@triton.jit
def _lowest_kept_kernel(scaled: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, lowest: tl.tensor, vocab_size: int,
                        CHUNK: tl.constexpr) -> None:
    row, k, p = tl.program_id(0), tl.load(top_k + tl.program_id(0)), tl.load(top_p + tl.program_id(0))
    values, bound = scaled + row.to(tl.int64) * vocab_size, float("-inf")
    if k < vocab_size:
        bound = _lower_bound(values, vocab_size, k.to(tl.float32), True, CHUNK)
    if p < 1:
        # Mass of the k largest: of equals of the last one only as many as belong to them.
        mass, number = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for first in range(0, vocab_size, CHUNK):
            ids = first + tl.arange(0, CHUNK)
            value = tl.load(values + ids, mask=ids < vocab_size, other=float("-inf"))
            mass += tl.where(value > bound, tl.exp(value), 0.0)
            number += tl.where(value > bound, 1.0, 0.0)
        total = tl.sum(mass, 0) + tl.maximum(k.to(tl.float32) - tl.sum(number, 0), 0.0) * tl.exp(bound)
        bound = tl.maximum(bound, _lower_bound(values, vocab_size, p * total, False, CHUNK))
    tl.store(lowest + row, bound)


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(largest value, float32 `[n]`; its id, int64 `[n]`) of each row of float32 logits `[n, vocab]`.

    The first of equals; a row with a NaN has the value NaN and any id. Equal in plain torch: `Tensor.max`.
    """
    (n, vocab_size), chunks = logits.shape, triton.cdiv(logits.shape[1], CHUNK)
    assert logits.stride(1) == 1
    best = torch.empty(n, chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    values = torch.empty(n, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        early = starts_early(logits)
        _largest_kernel[(n, chunks)](logits, best, best_ids, vocab_size, logits.stride(0), CHUNK=CHUNK, EARLY=early,
                                     num_warps=8, **early_launch(early))
        _pick_kernel[(n,)](best, best_ids, token_ids, values, chunks, WIDTH=triton.next_power_of_2(chunks),
                           LARGEST=True, EARLY=early, num_warps=1, **early_launch(early))
    return values, token_ids


def sample(logits: Tensor, temperature: Tensor, keys: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """(id, int64 `[n]`; whether a row is finite, bool `[n]`; the id of one that is not is 0) of logits `[n, vocab]`.

    A row whose `greedy` (int32 `[n]`) is not 0 takes its largest logit, the first of equals; the others draw with
    `temperature` (float32 `[n, 1]`) and `keys` (int32 `[2, n, 1]`), no filter between. Logits are read once: a chunk of
    ids is drawn from relative to its own largest logit, which is made up for between chunks. Equal in plain torch, but
    for that rounding: `Tensor.max` and `layers.sampler.draw`.
    """
    (n, vocab_size), chunks = logits.shape, triton.cdiv(logits.shape[1], CHUNK)
    assert logits.stride(1) == 1 and keys.is_contiguous()
    # Apart: the second half of one tensor would lie elsewhere for one row, to Triton another kernel.
    best, peaks = (torch.empty(n, chunks, dtype=torch.float32, device=logits.device) for _ in range(2))
    best_ids = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    finite = torch.empty(n, dtype=torch.bool, device=logits.device)
    if n:
        early = starts_early(logits)
        _sample_kernel[(n, chunks)](
            logits, temperature, keys, greedy, best, peaks, best_ids, vocab_size, logits.stride(0), CHUNK=CHUNK,
            EARLY=early, FAST=logits.is_cuda, num_warps=8, **early_launch(early))
        _pick_sample_kernel[(n,)](
            best, peaks, best_ids, temperature, greedy, token_ids, finite, chunks,
            WIDTH=triton.next_power_of_2(chunks), EARLY=early, num_warps=1, **early_launch(early))
    return token_ids, finite


def lowest_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """float32 `[n, 1]`: the smallest value of each row of scaled `[n, vocab]` that top-k and then top-p keep.

    scaled: float32, contiguous, 0 the largest of a row. top_k: int64 `[n, 1]`, vocab where off; top_p: float32
    `[n, 1]`, 1 where off. No sort: a row is read some 16 times for each of the two. Equal in plain torch:
    `layers.sampler.lowest_kept`.
    """
    n, vocab_size = scaled.shape
    assert scaled.is_contiguous()
    lowest = torch.empty(n, 1, dtype=torch.float32, device=scaled.device)
    if n:
        _lowest_kept_kernel[(n,)](scaled, top_k, top_p, lowest, vocab_size, CHUNK=RANKED_CHUNK, num_warps=16)
    return lowest


def draw(
    logits: Tensor, largest: Tensor, temperature: Tensor, keys: Tensor, lowest: Tensor | None, log_min_p: Tensor | None
) -> Tensor:
    """int64 `[n]`: one id a row of logits `[n, vocab]`, whose rows are contiguous and have the maxima `largest` `[n]`.

    `temperature`, and the filters `lowest` and `log_min_p` on what it divides (None: off), are float32 `[n, 1]`; `keys`
    int32 `[2, n, 1]`. A row with no finite maximum gets any id. Equal in plain torch: `layers.sampler.draw`.
    """
    (n, vocab_size), chunks = logits.shape, triton.cdiv(logits.shape[1], CHUNK)
    assert logits.stride(1) == 1 and keys.is_contiguous()
    best = torch.empty(n, chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(n, chunks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        early = starts_early(logits)
        _draw_kernel[(n, chunks)](
            logits, largest, temperature, keys, temperature if lowest is None else lowest,
            temperature if log_min_p is None else log_min_p, best, best_ids, vocab_size, logits.stride(0),
            RANKED=lowest is not None, MIN_P=log_min_p is not None, CHUNK=CHUNK, EARLY=early, FAST=logits.is_cuda,
            num_warps=8, **early_launch(early))
        _pick_kernel[(n,)](best, best_ids, token_ids, best, chunks, WIDTH=triton.next_power_of_2(chunks),
                           LARGEST=False, EARLY=early, num_warps=1, **early_launch(early))
    return token_ids
