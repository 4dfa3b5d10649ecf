"""What a request may ask of its tokens, checked when it is asked."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.reuse_file import read_ratios

MAX_SEED = 2**63 - 1


def parse_recompute_ratio(value: Any, num_layers: int | None = None) -> float | tuple[float, ...]:
    """The share of an image's leading tokens to recompute, as one float or as a tuple of one float per decoder layer.

    A path is read as `nanovllm.calibrate` wrote it. With `num_layers` a list must have that length, and comes back as
    one number where all its numbers are equal. Raises ValueError for that, for anything outside [0, 1] and for a list
    that increases with depth: a row computed in layer l needs its hidden state of layer l - 1.
    """
    if isinstance(value, str) and value == "auto":
        raise ValueError("recompute_ratio='auto': give it to LLM(...), which knows the model's folder; a request takes "
                         "a number, one per decoder layer, or a path")
    if isinstance(value, (str, Path)):
        value = read_ratios(value)
    if isinstance(value, bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return check_number("recompute_ratio", value, lambda x: 0 <= x <= 1,
                            "a number from 0 (off) to 1, or one such number per decoder layer")
    ratios = tuple(check_number("recompute_ratio", x, lambda x: 0 <= x <= 1, "numbers from 0 to 1") for x in value)
    if not ratios:
        raise ValueError("recompute_ratio=[]: give one number, or one per decoder layer")
    if num_layers is not None and len(ratios) != num_layers:
        raise ValueError(f"recompute_ratio has {len(ratios)} numbers: give one number, or one for each of the model's "
                         f"{num_layers} decoder layers")
    if any(deeper > upper for upper, deeper in pairwise(ratios)):
        raise ValueError(f"recompute_ratio={list(ratios)}: give numbers that do not increase with depth")
    return ratios[0] if num_layers is not None and len(set(ratios)) == 1 else ratios


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How the tokens of one request are drawn, when they end, and how far its images may be reused; immutable.

    temperature: above 1e-10, at most 1e10; divides the logits. Greedy decoding is `top_k=1`, whatever the temperature.
    max_tokens: tokens to generate at most; None: to the end of the room that `max_model_len` leaves.
    ignore_eos: True goes on past every end-of-sequence id of the tokenizer, config and generation_config.
    top_k: draw from the k most likely tokens; 0 and -1: off. top_p: from the smallest set of that much probability;
    1: off. min_p: from those at least min_p times as likely as the most likely one; 0: off.
    seed: random numbers of the request depend on it and the token's index alone; None: the engine's.
    repetition_penalty: above 1e-10, at most 1e10; 1: off. Divides positive logits of tokens seen before
    and multiplies negative ones.
    min_tokens: no end-of-sequence or stop token id is drawn before so many tokens, and no stop string in them counts.
    stop: a string or several; generation ends where one appears, and `text` ends just before it.
    stop_token_ids: ids that end generation, also with ignore_eos; in `token_ids` but not in `text`.
    logprobs: n: each generated token gets {token id: log-probability} of the n most likely ones and of itself, from
    the raw logits; -1: of the whole vocabulary; None: nothing.
    recompute_ratio: share of the leading tokens of a reused image that are computed again, one number or one per
    decoder layer, not increasing, or the path of a file that `nanovllm.calibrate` wrote; 0: no reuse; None: the
    engine's. See `parse_recompute_ratio`.
    reuse_any_ordinal: whether an image may be reused from another ordinal (number of images before it); None: the
    engine's. cache_salt: requests share cached data only with requests of the same salt.

    Raises ValueError naming the value and what to give instead.
    """

    temperature: float
    max_tokens: int | None
    ignore_eos: bool
    top_k: int                  # 0: off
    top_p: float
    min_p: float
    seed: int | None
    repetition_penalty: float
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    recompute_ratio: float | tuple[float, ...] | None
    reuse_any_ordinal: bool | None
    cache_salt: str | None

    def __init__(
        self, temperature: float = 1.0, max_tokens: int | None = 64, ignore_eos: bool = False, *,
        top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int | None = None,
        repetition_penalty: float = 1.0, min_tokens: int = 0, stop: str | Sequence[str] | None = None,
        stop_token_ids: Iterable[int] | None = None, logprobs: int | None = None,
        recompute_ratio: float | Sequence[float] | str | Path | None = None, reuse_any_ordinal: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        values = dict(
            temperature=check_number("temperature", temperature, lambda x: 1e-10 < x <= 1e10,
                                     "a number above 1e-10 and at most 1e10; top_k=1 is greedy decoding"),
            max_tokens=None if max_tokens is None else check_int(
                "max_tokens", max_tokens, 1, "a whole number of at least 1, or None for all the room there is"),
            ignore_eos=check_bool("ignore_eos", ignore_eos),
            top_k=max(0, check_int("top_k", top_k, -1, "a whole number of at least 1, or 0 or -1 to turn it off")),
            top_p=check_number("top_p", top_p, lambda x: 0 < x <= 1, "a number above 0 and at most 1 (off)"),
            min_p=check_number("min_p", min_p, lambda x: 0 <= x <= 1, "a number from 0 (off) to 1"),
            seed=check_seed(seed),
            repetition_penalty=check_number("repetition_penalty", repetition_penalty, lambda x: 1e-10 < x <= 1e10,
                                            "a number above 1e-10 and at most 1e10; 1 is off"),
            min_tokens=check_int("min_tokens", min_tokens, 0, "a whole number of at least 0"),
            stop=_parse_stop(stop),
            stop_token_ids=_parse_stop_token_ids(stop_token_ids),
            logprobs=None if logprobs is None else check_int(
                "logprobs", logprobs, -1, "a whole number of at least 0, or -1 for the whole vocabulary, or None"),
            recompute_ratio=None if recompute_ratio is None else parse_recompute_ratio(recompute_ratio),
            reuse_any_ordinal=(
                None if reuse_any_ordinal is None else check_bool("reuse_any_ordinal", reuse_any_ordinal)),
            cache_salt=cache_salt,
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={min_tokens}: give at most max_tokens, which is {max_tokens}")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt={cache_salt!r}: give a string, or None")


def check_seed(seed: Any) -> int | None:
    """`seed` as an int that fits a signed 64-bit word, or None."""
    remedy = "a whole number from 0 to 2**63 - 1, or None"
    if seed is not None and check_int("seed", seed, 0, remedy) > MAX_SEED:
        raise ValueError(f"seed={seed!r}: give {remedy}")
    return None if seed is None else int(seed)


def _parse_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) and text for text in strings):
        raise ValueError(f"stop={stop!r}: give a string or a list of strings, none of them empty")
    return tuple(strings)


def _parse_stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is not None and (isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable)):
        raise ValueError(f"stop_token_ids={ids!r}: give a list of token ids")
    return tuple(check_int("stop_token_ids", token_id, 0, "token ids, whole numbers of at least 0")
                 for token_id in ids or ())
