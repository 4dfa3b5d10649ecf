"""SamplingParams keeps what is right, normalises what has two spellings and refuses the rest by name."""
from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm.sampling_params import SamplingParams, parse_recompute_ratio

NAN, INF = math.nan, math.inf


def test_signature_is_the_published_one() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ["temperature", "max_tokens", "ignore_eos"]
    assert {name: parameter.default for name, parameter in parameters.items()} == dict(
        temperature=1.0, max_tokens=64, ignore_eos=False, top_k=0, top_p=1.0, min_p=0.0, seed=None,
        repetition_penalty=1.0, min_tokens=0, stop=None, stop_token_ids=None, logprobs=None, recompute_ratio=None,
        reuse_any_ordinal=None, cache_salt=None)


def test_two_spellings_become_one() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids={7}) == SamplingParams(stop=("a", "b"), stop_token_ids=[7])
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), top_k=np.int32(1))
    assert (params.temperature, params.max_tokens, params.top_k) == (0.5, 3, 1)
    assert type(params.temperature) is float and type(params.max_tokens) is int


def test_params_are_shared_safely() -> None:
    params = SamplingParams(max_tokens=None, recompute_ratio=[0.5, 0.25])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]
    changed = dataclasses.replace(params, max_tokens=5)
    assert (changed.max_tokens, changed.recompute_ratio) == (5, (0.5, 0.25)) and params.max_tokens is None
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize("name, values", [
    ("temperature", [0, 0.0, 1e-10, -1.0, 1e11, NAN, INF, "1", None, True]),
    ("max_tokens", [0, -3, 1.5, "5", True, NAN]),
    ("ignore_eos", [0, 1, "no", None]),
    ("top_k", [-2, -7, 1.0, "1", True, None]),
    ("top_p", [0.0, 1.5, -0.1, NAN, "1", True, None]),
    ("min_p", [-0.1, 1.1, NAN, False, None]),
    ("seed", [-1, 2**63, 0.5, "0", True]),
    ("repetition_penalty", [0.0, -1.0, 1e-300, 1e300, NAN, INF, True]),
    ("min_tokens", [-1, 65, 1.0, True, None]),
    ("stop", [[""], "", [1], 5, b"x"]),
    ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["5"]]),
    ("logprobs", [-2, 1.0, True, "5"]),
    ("recompute_ratio", [-0.1, 1.1, NAN, True, "0.1", [], [0.1, 0.2], [0.5, 1.5], [0.5, True], ["0.5"], np.array(0.5)]),
    ("reuse_any_ordinal", [0, 1, "no"]),
    ("cache_salt", [5, b"x", ["x"]]),
])
def test_wrong_values_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}=.*: give ") as error:
            SamplingParams(**{name: value})
        shown = value[-1] if isinstance(value, list) and value else value
        assert str(shown) in str(error.value)


def test_temperature_zero_names_greedy() -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.0: .*top_k=1"):
        SamplingParams(temperature=0.0)


def test_limits_are_inside() -> None:
    for given in (dict(temperature=1.1e-10), dict(max_tokens=10**9), dict(top_p=1), dict(min_p=1), dict(seed=2**63 - 1),
                  dict(seed=0), dict(min_tokens=64), dict(logprobs=0), dict(logprobs=-1), dict(recompute_ratio=0),
                  dict(recompute_ratio=1), dict(recompute_ratio=[1, 0.5, 0.5, 0]), dict(cache_salt="")):
        SamplingParams(**given)  # type: ignore[arg-type]


def test_ratio_per_layer() -> None:
    assert parse_recompute_ratio([0.5, 0.5, 0.0], num_layers=3) == (0.5, 0.5, 0.0)
    assert parse_recompute_ratio((0.5, 0.5), num_layers=2) == 0.5          # equal numbers are the number
    assert parse_recompute_ratio(np.array([0.5, 0.25]), num_layers=2) == (0.5, 0.25)
    assert parse_recompute_ratio(0.5, num_layers=2) == 0.5
    for wrong in ([0.5, 0.5, 0.5], [0.5]):
        with pytest.raises(ValueError, match=f"has {len(wrong)} numbers.* 2 decoder layers"):
            parse_recompute_ratio(wrong, num_layers=2)


def test_ratio_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ratios.json"
    file.write_text('{"recompute_ratio": [0.5, 0.25]}')
    assert SamplingParams(recompute_ratio=file).recompute_ratio == (0.5, 0.25)
    assert SamplingParams(recompute_ratio=str(file)).recompute_ratio == (0.5, 0.25)
    with pytest.raises(ValueError, match=r"recompute_ratio='auto': give it to LLM"):
        SamplingParams(recompute_ratio="auto")
    with pytest.raises(ValueError, match=r"recompute_ratio='nowhere.json': give .* nanovllm.calibrate"):
        SamplingParams(recompute_ratio="nowhere.json")
