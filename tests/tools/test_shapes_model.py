"""The model in the repository answers questions that it was not trained on, and shows what reuse must keep apart."""
from __future__ import annotations

import json

import pytest

from benchmarks.models import SHAPES_MODEL
from nanovllm.quality import __main__ as quality
from tools import check_reuse


def test_held_out_questions(capsys: pytest.CaptureFixture[str]) -> None:
    quality.main([str(SHAPES_MODEL), "--builtin", "--device", "cpu", "--limit", "60", "--ratios", "0.05", "--json"])
    lines = json.loads(capsys.readouterr().out)["lines"]
    full, reused = (next(line["accuracy"] for line in lines if line["kind"] == "all" and line["setting"] == setting)
                    for setting in ("full prefill", "0.05"))
    assert full >= 0.9 and reused >= 0.85


def test_places_ordinals_and_beginnings() -> None:
    assert check_reuse.main([str(SHAPES_MODEL), "--per-kind", "5", "--device", "cpu"]) == 0
