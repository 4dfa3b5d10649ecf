"""Refuses option values of the wrong type or range with a ValueError that names the value and the remedy."""
from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any


def check_int(name: str, value: Any, minimum: int, remedy: str) -> int:
    """`value` as an int of at least `minimum`; `remedy` says what to give instead. Booleans are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name}={value!r}: give {remedy}")
    return int(value)


def check_number(name: str, value: Any, accepts: Callable[[float], bool], remedy: str) -> float:
    """`value` as a finite float that `accepts` agrees to; `remedy` says what to give instead."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not accepts(float(value)):
        raise ValueError(f"{name}={value!r}: give {remedy}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """`value`, which must be True or False: 0, 1 and "false" are refused rather than guessed."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False")
    return value


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """`value`, which must be one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")
    return value
