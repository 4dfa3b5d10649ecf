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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("seed", [0, 3, 5])
def test_drawn_case_on_a_gpu_equals_transformers(tmp_path, seed, enforce_eager, backend):
    case = draw_case(seed)
    outcome = compare(case, make_checkpoint(case, tmp_path), device="cuda", attention_backend=backend,
                      enforce_eager=enforce_eager, max_num_seqs=8, gpu_memory_utilization=0.1)
    assert outcome.tokens_equal and outcome.max_difference < 1e-3
    assert outcome.preemptions > 0 and outcome.cached_tokens > 0
