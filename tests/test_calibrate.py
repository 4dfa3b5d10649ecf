"""Calibrated ratios fall with depth, cost no more rows than the flat ratio, and are what LLM takes as "auto"."""
from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.calibrate import main, num_rows, ratios_of, shares_of
from tests.checkpoints import make_qwen2_5_vl


def test_layers_out_of_order_are_pooled() -> None:
    assert shares_of([1.0, 0.5, 0.25, 0.0]) == [0.5, 0.25, 0.25]
    assert shares_of([1.0, 0.9, 0.4, 0.0]) == pytest.approx([1 / 3] * 3)
    assert shares_of([1.0, 1.2, 0.6, 0.6]) == pytest.approx([0.3, 0.3, 0])      # the middle layer helps most


@pytest.mark.parametrize("budget", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("errors", [[1, 0.5, 0.25, 0], [1, 0.01, 0.001, 0], [1, 2, 3, 0], [5, 0, 0, 0]])
def test_cost_is_at_most_the_flat_one(errors: list[float], budget: float) -> None:
    sizes = [16, 40, 77, 144]
    ratios = ratios_of(errors, budget, sizes)
    assert num_rows(ratios, sizes) <= num_rows([budget] * 3, sizes)
    assert all(a >= b for a, b in pairwise(ratios)) and 0 < ratios[0] <= 1


def test_ratios_follow_the_root_of_the_error() -> None:
    first, second, third = ratios_of([0.14, 0.05, 0.01, 0], 0.1, [1_000_000])
    assert first / third == pytest.approx(3, rel=1e-3) and second / third == pytest.approx(2, rel=1e-3)
    assert first + second + third == pytest.approx(0.3, rel=1e-3)


def test_equal_layers_get_the_flat_ratio() -> None:
    assert ratios_of([0.0] * 4, 0.05, [100]) == [0.05] * 3


def test_the_file_is_used_by_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_qwen2_5_vl(tmp_path / "model")
    main([str(model), "--builtin", "--limit", "2", "--budget", "0.2", "--device", "cpu"])
    written = json.loads((model / "reuse.json").read_text())
    assert len(written["recompute_ratio"]) == 3 and len(written["kl_with_layers_computed"]) == 4
    assert written["kl_with_layers_computed"][0] > 0 and math.isclose(
        written["kl_with_layers_computed"][-1], 0, abs_tol=1e-9)
    assert "rows: " in capsys.readouterr().out
    with LLM(str(model), device="cpu", kvcache_memory_gb=0.05, recompute_ratio="auto") as llm:
        used = llm.config.recompute_ratio
        assert (list(used) if isinstance(used, tuple) else [used] * 3) == written["recompute_ratio"]


@pytest.mark.parametrize("budget", ["0", "1", "-1"])
def test_budget_is_checked(budget: str) -> None:
    with pytest.raises(ValueError, match=f"budget {float(budget)}: give"):
        main(["nowhere", "--builtin", "--budget", budget])
