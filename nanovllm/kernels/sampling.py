"""One token id a row of logits, drawn by Gumbel-max, without a word to the host."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096        # ids that one program looks at


@triton.jit
def _gumbel_noise(ids: tl.tensor, key: tl.tensor, other_key: tl.tensor) -> tl.tensor:
    """The noise of `layers.sampler.gumbel_noise`: the same bits, the same steps to a float."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + key
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x += other_key
    x *= 0x735A2D97
    x ^= x >> 15
    x *= 0x9E485565
    x ^= x >> 16
    uniform = (x >> 8).to(tl.float32) * 0.000000059604644775390625                      # 2^-24
    uniform += ((x & 0xFF).to(tl.float32) + 0.5) * 0.00000000023283064365386962890625   # 2^-32
    series = uniform + uniform * uniform * 0.5
    by_log = -tl.log(tl.maximum(1 - uniform, 0.000000059604644775390625))
    return -tl.log(tl.where(uniform < 0.0009765625, series, by_log))                    # 2^-10


@triton.jit
def _draw_kernel(
    logits: tl.tensor, largest: tl.tensor, temperature: tl.tensor, keys: tl.tensor, lowest: tl.tensor,
    log_min_p: tl.tensor, best: tl.tensor, best_ids: tl.tensor, vocab_size: int, stride: int,
    RANKED: tl.constexpr, MIN_P: tl.constexpr, CHUNK: tl.constexpr,
) -> None:
    """The winner of one chunk of ids."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = ids < vocab_size
    logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    # rounded like the twin's quotient, since a filter's bound is one of these values
    scaled = tl.div_rn(logit - tl.load(largest + row), tl.load(temperature + row))
    if RANKED:
        scaled = tl.where(scaled < tl.load(lowest + row), float("-inf"), scaled)
    if MIN_P:
        scaled = tl.where(scaled < tl.load(log_min_p + row), float("-inf"), scaled)
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    other_key = tl.load(keys + tl.num_programs(0) + row).to(tl.uint32, bitcast=True)
    drawn = scaled + _gumbel_noise(ids, key, other_key)
    value, place = tl.max(tl.where(drawn == drawn, drawn, float("-inf")), 0, return_indices=True)     # NaN never wins
    out = row * tl.num_programs(1) + chunk
    tl.store(best + out, value)
    tl.store(best_ids + out, tl.minimum(chunk * CHUNK + place, vocab_size - 1))


@triton.jit
def _pick_kernel(best: tl.tensor, best_ids: tl.tensor, token_ids: tl.tensor, chunks: int, WIDTH: tl.constexpr) -> None:
    """The winner of a row's chunks; the first one of equals."""
    row, chunk = tl.program_id(0), tl.arange(0, WIDTH)
    values = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    winner = tl.argmax(values, 0)
    tl.store(token_ids + row, tl.load(best_ids + row * chunks + winner).to(tl.int64))


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
        _draw_kernel[(n, chunks)](
            logits, largest, temperature, keys, temperature if lowest is None else lowest,
            temperature if log_min_p is None else log_min_p, best, best_ids, vocab_size, logits.stride(0),
            RANKED=lowest is not None, MIN_P=log_min_p is not None, CHUNK=CHUNK, num_warps=8)
        _pick_kernel[(n,)](best, best_ids, token_ids, chunks, WIDTH=triton.next_power_of_2(chunks), num_warps=1)
    return token_ids
