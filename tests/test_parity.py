"""Greedy tokens of 32 steps and logprobs equal transformers' in float32, however the engine cuts, caches and preempts.

`python -m tests.parity --cases 40` runs as many cases as one likes.
"""
from __future__ import annotations

import pytest

from tests.parity import compare, draw_case, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")   # from 5.24 on


@pytest.mark.parametrize("seed", range(8))
def test_drawn_case_equals_transformers(tmp_path, seed):
    case = draw_case(seed)
    outcome = compare(case, make_checkpoint(case, tmp_path))
    assert outcome.tokens_equal and outcome.max_difference < 1e-3
    assert outcome.preemptions > 0 and outcome.cached_tokens > 0
