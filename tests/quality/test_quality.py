"""The quality command measures what reuse does: nothing where all is computed, less error the more is computed."""
from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.quality.__main__ import main
from nanovllm.quality.measure import ONE_ROW, Examiner, is_right, kl_divergence, measure
from nanovllm.quality.questions import builtin_questions
from nanovllm.quality.report import plot, summarize, table
from tests.checkpoints import make_qwen2_5_vl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


def run(model: Path, *args: str, capsys: pytest.CaptureFixture[str]) -> str:
    main([str(model), "--builtin", "--device", "cpu", "--max-tokens", "2", *args])
    return capsys.readouterr().out


def test_every_ratio_against_full_prefill(model: Path) -> None:
    ratios = (1.0, 0.5, ONE_ROW, (1.0, 0.5, ONE_ROW))
    with LLM(str(model), device="cpu", kvcache_memory_gb=0.05, enable_prefix_caching=False) as llm:
        outcomes = measure(Examiner(llm, max_tokens=2), list(builtin_questions(1))[:6], ratios, lambda _: None)
    by_setting = {setting: [o for o in outcomes if o.setting == setting] for setting in range(-1, 4)}
    assert all(len(group) == 6 for group in by_setting.values())
    for full in (*by_setting[-1], *by_setting[0]):
        assert full.all_equal and full.kl < 1e-9 and full.computed_tokens == full.image_tokens
    for half, row in zip(by_setting[1], by_setting[2]):
        assert abs(half.computed_tokens - half.image_tokens / 2) <= 2
        assert row.computed_tokens == {"two images": 2}.get(row.kind, 1) and row.kl > 0
    mean = [np.mean([outcome.kl for outcome in by_setting[setting]]) for setting in (1, 2)]
    assert 0 < mean[0] < mean[1]
    assert all(outcome.computed_tokens == outcome.image_tokens for outcome in by_setting[3])


def test_pictures_seen_bare_are_reused(model: Path) -> None:
    with LLM(str(model), device="cpu", kvcache_memory_gb=0.05, enable_prefix_caching=False) as llm:
        examiner = Examiner(llm, 1, first_seen="bare")
        outcomes = measure(examiner, list(builtin_questions(1))[:1], [ONE_ROW], lambda _: None)
    assert outcomes[1].computed_tokens == 1 and outcomes[1].kl > 0


def test_batches_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, by_size = list(builtin_questions(1)), {}
    with LLM(str(model), device="cpu", dtype="float32", kvcache_memory_gb=0.05, enable_prefix_caching=False) as llm:
        for size in (1, 4, 32):
            monkeypatch.setattr("nanovllm.quality.measure.MAX_QUESTIONS", size)
            sizes: list[int] = []
            by_size[size] = measure(Examiner(llm, max_tokens=3), questions, [0.2], sizes.append, timed_per_kind=0)
            assert sizes == {1: [1] * 10, 4: [4, 4, 2], 32: [10]}[size]
    for alone, few, many in zip(*by_size.values()):
        assert alone.kl == pytest.approx(few.kl, abs=1e-6) == pytest.approx(many.kl, abs=1e-6)
        assert (alone.kind, alone.setting, alone.all_equal, alone.computed_tokens) == (
            many.kind, many.setting, many.all_equal, many.computed_tokens)


def test_batches_fit_the_pool(model: Path) -> None:
    with LLM(str(model), device="cpu", num_kvcache_blocks=16, enable_prefix_caching=False) as llm:
        batches = list(Examiner(llm, max_tokens=3).batches(builtin_questions(1)))
    assert len(batches) >= 5 and sum(map(len, batches)) == 10


def test_only_some_are_timed_alone(model: Path) -> None:
    questions = [question for question in builtin_questions(2) if question.kind == "only"]
    with LLM(str(model), device="cpu", kvcache_memory_gb=0.05, enable_prefix_caching=False) as llm:
        outcomes = measure(Examiner(llm, max_tokens=1), questions, [0.2], lambda _: None, timed_per_kind=1)
    assert [outcome.ttft is not None for outcome in outcomes] == [True, True, False, False]


def test_seeds_give_other_questions_and_other_places(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [json.loads(run(model, "--limit", "2", "--ratios", "row", "--json", "--seed", seed, capsys=capsys))
               for seed in ("1", "1", "2")]
    kls = [[line["kl_mean"] for line in output["lines"]] for output in outputs]
    assert kls[0] == kls[1] != kls[2] and outputs[2]["seed"] == 2
    with LLM(str(model), device="cpu", kvcache_memory_gb=0.05, enable_prefix_caching=False) as llm:
        places = [[posed.showing["input_ids"].shape[1] for posed in batch] for seed in (1, 2)
                  for batch in Examiner(llm, seed=seed).batches(list(builtin_questions(1)))]
    assert places[0] != places[1]


def test_table_json_and_plot(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(model, "--limit", "2", "--ratios", "1", "row", capsys=capsys)
    assert "all (2 questions)" in output and "position (1 questions)" in output and "one row" in output
    plotted = tmp_path / "plot.png"
    ratios = tmp_path / "ratios.json"
    ratios.write_text("[0.5, 0.5, 0]")
    output = run(model, "--limit", "1", "--ratios", "0.5", str(ratios), "--json", capsys=capsys)
    lines = json.loads(output)["lines"]
    assert [line["setting"] for line in lines[:3]] == ["full prefill", "0.5", str(ratios)]
    assert lines[0]["share_computed"] == 1 and 0.4 < lines[1]["share_computed"] < 0.6 and lines[0]["ttft_ms"] > 0
    pytest.importorskip("matplotlib")
    run(model, "--limit", "1", "--ratios", "row", "--plot", str(plotted), capsys=capsys)
    assert plotted.stat().st_size > 1000


def test_errors_name_what_is_wrong(model: Path, tmp_path: Path) -> None:
    for args, match in ((["--ratios", "2"], "recompute_ratio=2.0"), (["--ratios", "none.json"], "none.json"),
                        (["--limit", "0"], "--limit 0: give"), (["--limit", "-1"], "--limit -1: give")):
        with pytest.raises(ValueError, match=match):
            main([str(model), "--builtin", "--device", "cpu", "--limit", "1", *args])


@pytest.mark.parametrize("command, option", [("quality", "--plot"), ("calibrate", "--out")])
def test_commands_end_with_a_line_that_says_why(command: str, option: str, tmp_path: Path) -> None:
    for args, said in (([], "is not a folder"), ([option, f"{tmp_path}/none/file"], "none is no folder")):
        ended = subprocess.run([sys.executable, "-m", f"nanovllm.{command}", f"{tmp_path}/nowhere", "--builtin", *args],
                               capture_output=True, text=True)
        assert ended.returncode and said in ended.stderr and "Traceback" not in ended.stderr


def test_summary_needs_no_answers() -> None:
    from nanovllm.quality.measure import Outcome

    outcomes = [Outcome("all", setting, None, True, setting < 0, 0.5 * (setting + 1), 10, 10 - 8 * (setting + 1), 0.01)
                for setting in (-1, 0)]
    lines = summarize(outcomes, ["0.2"])
    assert [(line.setting, line.accuracy, line.answer_equal, line.share_computed) for line in lines] == [
        ("full prefill", None, 1, 1), ("0.2", None, 0, 0.2)]
    assert "10.0 ms" in table(lines)


def test_plot_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="needs matplotlib"):
        plot([], tmp_path / "plot.png", "")


def test_divergence_and_marks() -> None:
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert kl_divergence(p, q) == pytest.approx(0.25 * math.log(2)) and kl_divergence(p, p) == 0
    assert kl_divergence(np.array([0.0, -np.inf]), np.array([math.log(0.5)] * 2)) == pytest.approx(math.log(2))
    assert is_right("Red.", "red") and is_right("red star here", "Red star") and not is_right("12", "1")
