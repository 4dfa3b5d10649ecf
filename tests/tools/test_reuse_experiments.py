"""The dense model of the experiments answers as the engine does where the engine can do the same, and as full prefill
where every row is computed."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.quality.measure import ONE_ROW, Ratio
from nanovllm.quality.prompts import Inputs
from nanovllm.quality.questions import Question
from nanovllm.quality.report import Line
from tools import check_reuse, reuse_experiments, row_choices
from tools.reuse.choices import (
    Choice,
    at_equal_cost,
    by_layer,
    deviating,
    deviating_paid,
    evenly,
    last,
    leading,
    lower_layers,
    upper_layers,
)
from tools.reuse.donors import EXPERIMENTS, MANY, Experiment
from tools.row_choices import Bench
from tools.shapes.folder import new_model, save_weights, write_folder

ORDER = torch.tensor([3, 1, 0, 2, 4, 5, 9, 8, 7, 6])        # of ten rows, the most deviating last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes")
    write_folder(path, "tiny")
    save_weights(new_model(path, seed=3), path)
    return path


def questions_of(name: str, *kinds: str) -> list[Question]:
    return [question for question in EXPERIMENTS[name].questions(1, seed=5) if question.kind in kinds]


def in_engine(llm: LLM, shown: Inputs, asked: Inputs, ratio: Ratio) -> torch.Tensor:
    """Log-probabilities [vocab] of the first token of `asked`, the pictures seen in `shown` before."""
    def ask(inputs: Inputs, **options: object) -> dict[int, float]:
        params = SamplingParams(max_tokens=1, top_k=1, logprobs=-1, **options)
        [output] = llm.generate([inputs["input_ids"][0].tolist()], params, [inputs], use_tqdm=False)
        return output["logprobs"][0]

    llm.reset_caches()
    ask(shown, recompute_ratio=0.0)
    first = ask(asked, recompute_ratio=ratio)
    return torch.tensor([first[token] for token in range(len(first))])


@pytest.mark.parametrize("name", ["elsewhere", "other ordinals", "other pictures before", "4th to 8th both times"])
def test_leading_rows_as_in_the_engine(folder: Path, name: str) -> None:
    """Flat ratios and one per layer, pictures at their own ordinals, at others, and new ones among them."""
    bench, experiment = Bench(str(folder)), EXPERIMENTS[name]
    ratios: dict[str, Ratio] = {"half": 0.5, "some": 0.1, "row": ONE_ROW, "falling": (0.5, 0.2, ONE_ROW)}
    choices = [Choice("half", leading(0.5)), Choice("some", leading(0.1)), Choice("row", leading(ONE_ROW)), Choice(
        "falling", lambda layers, rows, order: torch.stack([leading(ratio)(1, rows, order)[0]
                                                            for ratio in (0.5, 0.2, ONE_ROW)]))]
    questions = questions_of(name, "position", "text before", "two images", "three images")[:3]
    batch = [bench.pose(question, experiment, random.Random(i)) for i, question in enumerate(questions)]
    full, exact = bench.dense.run([posed.asking for posed in batch])
    given = row_choices.given_kv(batch, exact, bench.dense.run([posed.showing for posed in batch])[1])
    with LLM(str(folder), device="cpu", dtype="float32", kvcache_memory_gb=0.05, enable_prefix_caching=False,
             reuse_any_ordinal=True) as llm:
        for choice in choices:
            computed = row_choices.computed_rows(batch, choice, exact, given)
            dense, _ = bench.dense.run([posed.asking for posed in batch], given, computed)
            for i, question in enumerate(questions):
                shown = experiment.how(question.pictures, random.Random(i))
                engine = in_engine(llm, bench.prompts.asking(shown), bench.prompts.asking(question),
                                   ratios[choice.name])
                torch.testing.assert_close(dense[i], engine, atol=1e-4, rtol=0)
                assert (dense[i] - full[i]).abs().max() > 1e-3, "reuse must make a difference, or nothing is compared"


def test_all_rows_are_full_prefill_and_padding_is_not_seen(folder: Path) -> None:
    bench, experiment = Bench(str(folder)), EXPERIMENTS["elsewhere"]
    batch = [bench.pose(question, experiment, random.Random(0)) for question in experiment.questions(1, seed=1)]
    outcomes = list(bench.outcomes(batch, [Choice("all", leading(1.0)), Choice("none", lower_layers(0))]))
    by_setting = {setting: [o for o in outcomes if o.setting == setting] for setting in (-1, 0, 1)}
    assert all(o.kl < 1e-9 for o in by_setting[-1]) and all(o.kl < 1e-8 and o.first_equal for o in by_setting[0])
    assert all(o.kl > 1e-6 for o in by_setting[1])
    together, _ = bench.dense.run([posed.asking for posed in batch])
    for row, posed in zip(together, batch):
        torch.testing.assert_close(row, bench.dense.run([posed.asking])[0][0], atol=1e-5, rtol=0)


def test_the_first_layer_needs_no_context(folder: Path) -> None:
    """Its keys and values come from the embeddings alone: to compute them again repairs nothing."""
    bench, experiment = Bench(str(folder)), EXPERIMENTS["elsewhere"]
    batch = [bench.pose(question, experiment, random.Random(0)) for question in experiment.questions(1, seed=1)[:3]]
    none, first = (list(bench.outcomes(batch, [Choice("", lower_layers(count))]))[3:] for count in (0, 1))
    # With the first layer computed, hidden states end there: the layers above have reused KV either way.
    assert [a.kl for a in none] == pytest.approx([b.kl for b in first], rel=1e-3)


def chosen(choose: object) -> list[list[int]]:
    mask = choose(4, 10, ORDER)                             # type: ignore[operator]
    return [row.nonzero().flatten().tolist() for row in mask]


def test_choices_of_rows() -> None:
    assert chosen(leading(0.25)) == [[0, 1, 2]] * 4
    assert chosen(last(0.25)) == [[7, 8, 9]] * 4
    assert chosen(evenly(0.25)) == [[1, 5, 8]] * 4
    assert chosen(deviating(0.25)) == [[6, 7, 8]] * 4
    assert chosen(deviating_paid(0.4)) == [list(range(10)), [6, 7], [6, 7], [6, 7]]
    assert chosen(lower_layers(1)) == [list(range(10)), [], [], []]
    assert chosen(upper_layers(1)) == [[], [], [], list(range(10))]


def test_choices_that_are_compared_cost_the_same() -> None:
    for choice in at_equal_cost(8):
        ratio = float(choice.name.split()[-1])
        share = choice.choose(8, 1000, torch.arange(1000)).float().mean().item()
        assert share == pytest.approx(ratio, abs=2e-3), choice.name
    assert [choice.name for choice in by_layer(2)] == [
        "computed below layer 0", "computed below layer 1", "computed below layer 2", "computed from layer 0",
        "computed from layer 1"]


def moved_by(bench: Bench, question: Question, experiment: Experiment) -> int:
    """Positions between the place at which a question's first picture is first seen and the one where it is asked."""
    posed = bench.pose(question, experiment, random.Random(0))
    shown, asked = (int(prompt.positions[prompt.images[0][0], 0]) for prompt in (posed.showing, posed.asking))
    return shown - asked


def test_pictures_are_first_seen_as_the_experiments_say(folder: Path) -> None:
    bench = Bench(str(folder))
    for name, experiment in EXPERIMENTS.items():
        questions = experiment.questions(1, seed=2)
        assert len(questions) in (10, 5, 3)
        for question in questions:
            shown = experiment.how(question.pictures, random.Random(0))
            places = [shown.pictures.index(picture) if picture in shown.pictures else None
                      for picture in question.pictures]
            own = list(range(len(places)))
            if name == "other ordinals":
                assert None not in places and all(place != i for i, place in enumerate(places))
            elif name in ("other pictures before", "4th to 8th both times"):
                assert places == [None] * len(own[:-1]) + [own[-1]]
            elif name == "first seen as 4th to 8th":
                assert places[0] is not None and MANY[0] <= places[0] + 1 <= MANY[1]
            elif name != "video before":
                assert places == own
        if name == "elsewhere, keys not turned":
            assert all(moved_by(bench, question, experiment) >= 100 for question in questions)
        if name == "4th to 8th both times":
            assert all(MANY[0] <= len(question.pictures) <= MANY[1] for question in questions)


@pytest.mark.parametrize("name", ["elsewhere, keys not turned", "video before"])
def test_experiments_in_the_engine(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = tmp_path / "lines.json"
    reuse_experiments.main([str(folder), "--per-kind", "1", "--experiments", "elsewhere", name, "--device", "cpu",
                            "--json", str(file)])
    assert f"{name}, seed 0: all (" in capsys.readouterr().out
    by_name = json.loads(file.read_text())
    turned, other = ({line["setting"]: line for line in by_name[each] if line["kind"] == "all"}
                     for each in ("elsewhere", name))
    assert 0 < turned["one row"]["share_computed"] < 0.05 and other["one row"]["kl_mean"] > 0


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.json"
    row_choices.main([str(folder), "--per-kind", "1", "--table", "layers", "--json", str(file)])
    assert "elsewhere, seed 0: all (10 questions)" in capsys.readouterr().out
    lines = {line["setting"]: line for line in json.loads(file.read_text())["lines"] if line["kind"] == "all"}
    assert lines["computed below layer 3"]["kl_mean"] < 1e-8 < lines["computed below layer 0"]["kl_mean"]
    assert lines["computed from layer 0"]["kl_mean"] < 1e-8


def test_checks_fail_on_what_reuse_must_not_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained model loses no answers, having none; the checks are told apart by lines that are made up."""
    assert check_reuse.main([str(folder), "--per-kind", "1", "--device", "cpu"]) == 1
    assert "FAIL  ordinals: accuracy" in capsys.readouterr().out

    def lines(accuracy: float, kl: float) -> dict[str, Line]:
        return {setting: Line(setting, "all", 10, right, 1.0, 1.0, kl, kl, 1.0, 0.1, None)
                for setting, right in (("full prefill", 0.95), (check_reuse.RATIO, accuracy))}

    good = {check_reuse.TURNED: lines(0.95, 1e-3), check_reuse.NOT_TURNED: lines(0.9, 3e-2),
            check_reuse.ORDINALS: lines(0.5, 1.0), check_reuse.BARE: lines(0.9, 1e-2),
            check_reuse.BEHIND_TEMPLATE: lines(0.95, 1e-3)}
    bad = {check_reuse.NOT_TURNED: lines(0.9, 1e-2), check_reuse.ORDINALS: lines(0.8, 1.0),
           check_reuse.BARE: lines(0.95, 1e-3)}
    assert [check.passed for check in check_reuse.checks(good)] == [True] * 3
    for i, (name, other) in enumerate(bad.items()):
        assert [check.passed for check in check_reuse.checks(good | {name: other})] == [j != i for j in range(3)]
