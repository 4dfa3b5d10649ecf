"""Logits to token ids: masks and penalties, then the argmax or a draw that depends on seed and token index alone."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention.contract import FusedOps

NEG_INF = float("-inf")


@dataclass(frozen=True)
class RandomRows:
    """Rows that draw at random, with equal needs; a filter that none of them wants is None."""

    rows: Tensor | None           # int64 [n] indices into the batch; None: all of it
    temperature: Tensor           # float32 [n, 1]
    keys: Tensor                  # int32 [2, n, 1] of the random stream at this token, see `uniform_bits`
    num_ranked: int               # how many of the largest logits the filters below look at; 0: none
    top_k: Tensor | None          # int64 [n, 1], the vocabulary's size where off
    top_p: Tensor | None          # float32 [n, 1], 1 where off
    log_min_p: Tensor | None      # float32 [n, 1], -inf where off


@dataclass(frozen=True)
class PenaltyRows:
    """Rows whose logits of ids seen before are made smaller."""

    rows: Tensor                  # int64 [n] indices into the batch
    seq_rows: Tensor              # int64 [n] batch rows that their sequences hold
    penalty: Tensor               # float32 [n, 1]


@dataclass(frozen=True)
class SeenResets:
    """The sequences new to their batch rows, and every id of theirs so far."""

    seq_rows: Tensor              # int64 [n]
    token_rows: Tensor            # int64 [ids] row of each id
    token_ids: Tensor             # int64 [ids]


@dataclass(frozen=True)
class SamplingInputs:
    """How to sample one batch, on the device; what nobody in it wants is None or empty."""

    random: tuple[RandomRows, ...]
    penalty: PenaltyRows | None
    resets: SeenResets | None
    banned: Tensor | None                     # int64 [2, n] row and id of each logit not to be sampled
    logprobs: LogprobRows | None


@dataclass(frozen=True)
class LogprobRows:
    """Rows that want logprobs."""

    rows: Tensor                              # int64 [asked] indices into the batch
    counts: tuple[tuple[int, int], ...]       # (index into the batch, how many; -1: the whole vocabulary), on the host


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of the rows that asked for them."""

    counts: tuple[tuple[int, int], ...]       # see LogprobRows
    sampled: Tensor                           # float32 [asked]
    top: Tensor                               # float32 [asked, widest], largest first
    top_ids: Tensor                           # int64 [asked, widest]


@dataclass(frozen=True)
class SamplerOutput:
    token_ids: Tensor                         # int64 [rows]
    finite: Tensor                            # bool [rows], False: nothing could be sampled, and the id is 0
    logprobs: TokenLogprobs | None

    def to_host(self) -> SamplerOutput:
        """The same in host memory, once the device has come this far in its queue."""
        logprobs = None if self.logprobs is None else TokenLogprobs(
            self.logprobs.counts, *(values.to("cpu", non_blocking=True) for values in
                                    (self.logprobs.sampled, self.logprobs.top, self.logprobs.top_ids)))
        return SamplerOutput(self.token_ids.to("cpu", non_blocking=True), self.finite.to("cpu", non_blocking=True),
                             logprobs)


class Sampler:
    """Samples one id a row of logits; it remembers which ids each sequence has seen once a penalty asks for it.

    In this order: the logprobs that a request gets are of the raw logits; ids that `known_vocab` (bool [vocab_size])
    denies are masked; repetition penalty (of prompt and output, positive logits divided, negative ones multiplied);
    banned ids; then the argmax for a greedy row, the first one of equals. A random row goes on: temperature; top-k;
    top-p of what is left, renormalised; min-p relative to the most likely token; one draw by Gumbel-max. Equals of the
    last token that top-k or top-p keeps are kept with it.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, known_vocab: NDArray[np.bool_] | None,
                 device: torch.device, fused: FusedOps | None = None) -> None:
        self.fused = fused
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.device = device
        unknown = np.flatnonzero(~known_vocab) if known_vocab is not None else np.empty(0, np.int64)
        self.unknown = torch.tensor(unknown, device=device) if len(unknown) else None
        self.num_known = vocab_size - len(unknown)
        self.unknown_are_last = not len(unknown) or int(unknown[0]) == self.num_known
        self.seen: Tensor | None = None       # bool [max_num_seqs, vocab_size], made when the first penalty comes
        # On the device already: a Python scalar would be copied there, and waited for, at each assignment.
        self.true, self.neg_inf = torch.tensor(True, device=device), torch.tensor(NEG_INF, device=device)

    def __call__(self, logits: Tensor, inputs: SamplingInputs) -> SamplerOutput:
        """One id for each row of `logits`, float32 [rows, vocab_size], which are overwritten.

        Reads nothing back to the host. A row with a NaN, or with no finite value left, is marked and gets id 0; the
        other rows do not notice.
        """
        raw = None if inputs.logprobs is None else logits[inputs.logprobs.rows]
        self._reset_seen(inputs.resets)
        self._mask(logits, inputs)
        largest, token_ids = logits.max(dim=-1) if self.fused is None else self.fused.largest(logits)
        finite = largest.isfinite()
        for group in inputs.random:
            if group.rows is None:
                token_ids = draw(logits, largest, group, self.fused)
            else:
                token_ids[group.rows] = draw(logits[group.rows], largest[group.rows], group, self.fused)
        token_ids = token_ids * finite        # 0 where nothing could be sampled
        if (penalty := inputs.penalty) is not None:
            self._seen_ids().index_put_((penalty.seq_rows, token_ids[penalty.rows]), self.true)
        if raw is None or inputs.logprobs is None:
            return SamplerOutput(token_ids, finite, None)
        return SamplerOutput(token_ids, finite, token_logprobs(raw, token_ids, inputs.logprobs))

    def draw_plainly(self, logits: Tensor, temperature: Tensor, keys: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
        """(ids int64 [rows], finite bool [rows]) for rows that want no filter, penalty, ban or logprobs; capturable.

        logits `[rows, vocab_size]` in the model's dtype, left as they are; temperature float32 [rows, 1]; keys int32
        [2, rows, 1] as of `RandomRows`; greedy int32 [rows], not 0: the argmax. The same ids as `__call__` gives, save
        where two draws lie closer together than float32 tells apart.
        """
        assert self.fused is not None
        if self.unknown_are_last:
            known = logits[:, :self.num_known]
        else:
            assert self.unknown is not None
            known = logits.index_fill(1, self.unknown, NEG_INF)
        return self.fused.sample(known, temperature, keys, greedy)

    def _mask(self, logits: Tensor, inputs: SamplingInputs) -> None:
        """Unknown ids, repetition penalty and banned ids, in place."""
        if self.unknown is not None:
            logits.index_fill_(1, self.unknown, NEG_INF)
        if (penalty := inputs.penalty) is not None:
            before = logits[penalty.rows]
            lowered = torch.where(before > 0, before / penalty.penalty, before * penalty.penalty)
            logits[penalty.rows] = torch.where(self._seen_ids()[penalty.seq_rows], lowered, before)
        if inputs.banned is not None:
            logits.index_put_((inputs.banned[0], inputs.banned[1]), self.neg_inf)

    def _seen_ids(self) -> Tensor:
        if self.seen is None:
            self.seen = torch.zeros(self.max_num_seqs, self.vocab_size, dtype=torch.bool, device=self.device)
        return self.seen

    def _reset_seen(self, resets: SeenResets | None) -> None:
        if resets is not None:
            seen = self._seen_ids()
            seen.index_fill_(0, resets.seq_rows, False)
            seen.index_put_((resets.token_rows, resets.token_ids), self.true)


# ---------------------------------------------------------------- random draws

def draw(logits: Tensor, largest: Tensor, group: RandomRows, fused: FusedOps | None = None) -> Tensor:
    """int64 [n]: one id a row of `logits` [n, vocab] whose largest values are `largest` [n]."""
    if fused is not None and not group.num_ranked:
        return fused.draw(logits, largest, group.temperature, group.keys, None, group.log_min_p)
    # The largest becomes 0, so that no temperature can turn a finite logit into an infinite one.
    scaled = (logits - largest.unsqueeze(1)) / group.temperature
    if fused is not None:
        assert group.top_k is not None and group.top_p is not None
        lowest = fused.lowest_kept(scaled, group.top_k, group.top_p)
        return fused.draw(logits, largest, group.temperature, group.keys, lowest, group.log_min_p)
    if group.num_ranked:
        scaled.masked_fill_(scaled < lowest_kept(scaled, group), NEG_INF)
    if group.log_min_p is not None:
        scaled.masked_fill_(scaled < group.log_min_p, NEG_INF)
    return scaled.add_(gumbel_noise(group.keys, scaled.shape[1])).argmax(dim=-1)


def lowest_kept(scaled: Tensor, group: RandomRows) -> Tensor:
    """[n, 1]: the smallest value of each row of `scaled` [n, vocab] that top-k and then top-p keep."""
    assert group.top_k is not None and group.top_p is not None
    ranked = scaled.topk(group.num_ranked).values                                # [n, num_ranked], largest first
    beyond_k = torch.arange(group.num_ranked, device=ranked.device) >= group.top_k
    probs = ranked.masked_fill(beyond_k, NEG_INF).softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    dropped = beyond_k | ((mass_before >= group.top_p) & (group.top_p < 1))
    last = (~dropped).sum(dim=-1, keepdim=True) - 1
    return ranked.gather(1, last.clamp(min=0))       # the first is kept unless the row is not finite


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocab_size], a function of the key and the id of each value alone."""
    bits = uniform_bits(keys, vocab_size)
    # 32 bits as a number in (0, 1): the top 24 and the low 8 apart, each exact in float32. An exponential variable is
    # -log(1 - u): u near 0, the end that wins draws, is where float32 is fine, but 1 - u is not: there by its series.
    uniform = ((bits >> 8) & 0xFFFFFF).float().mul_(2.0 ** -24)
    uniform += ((bits & 0xFF).float() + 0.5).mul_(2.0 ** -32)
    series = uniform + uniform * uniform * 0.5
    by_log = (1 - uniform).clamp_(min=2.0 ** -24).log_().neg_()
    return torch.where(uniform < 2.0 ** -10, series, by_log).log_().neg_()


def uniform_bits(keys: Tensor, vocab_size: int) -> Tensor:
    """32 random bits for each id, int32 [n, vocab_size], of keys int32 [2, n, 1].

    A counter-based hash: the id times an odd constant plus the first key, through two rounds of shift and multiply with
    the second key between them. int32 products wrap, so that the bits are those of unsigned arithmetic.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * as_int32(0x9E3779B1) + keys[0]
    x ^= shift_right(x, 16)
    x *= 0x21F0AAAD
    x ^= shift_right(x, 15)
    x += keys[1]
    x *= 0x735A2D97
    x ^= shift_right(x, 15)
    x *= as_int32(0x9E485565)
    x ^= shift_right(x, 16)
    return x


def shift_right(x: Tensor, count: int) -> Tensor:
    """int32 shifted as if it were unsigned."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def as_int32(bits: int) -> int:
    """The signed number of the same 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


# ---------------------------------------------------------------- logprobs

def token_logprobs(raw: Tensor, token_ids: Tensor, asked: LogprobRows) -> TokenLogprobs:
    """Logprobs of the asking rows `raw`, float32 [asked, vocab_size], of a batch that sampled `token_ids` [rows]."""
    logprobs = raw.log_softmax(dim=-1)
    vocab_size = logprobs.shape[1]
    top = logprobs.topk(max(vocab_size if n == -1 else min(n, vocab_size) for _, n in asked.counts), dim=-1)
    sampled = logprobs.gather(1, token_ids[asked.rows].unsqueeze(1)).squeeze(1)
    return TokenLogprobs(asked.counts, sampled, top.values, top.indices)


def logprob_dicts(logprobs: TokenLogprobs, token_ids: Sequence[int]) -> list[dict[int, float] | None]:
    """{id: logprob} of the top n and the sampled id for each row of the batch that asked, all on the host by now."""
    dicts: list[dict[int, float] | None] = [None] * len(token_ids)
    columns = zip(logprobs.counts, logprobs.sampled.tolist(), logprobs.top.numpy(), logprobs.top_ids.numpy())
    for (row, count), sampled, values, ids in columns:
        width = len(ids) if count == -1 else count
        dicts[row] = dict(zip(ids[:width].tolist(), values[:width].tolist())) | {token_ids[row]: sampled}
    return dicts
