"""On two GPUs ranks die, memory comes back, and engines run beside each other, as on CPUs."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest import mock

import pytest
import torch

from nanovllm.runner.workers import RankError
from tests.checkpoints import make_qwen3
from tests.engines import greedy, make_llm, run
from tests.parallel.test_death import await_end, generate_fails, program, rank_ids
from tests.prompts import prompt, text

pytestmark = pytest.mark.multi_gpu
ROOT = Path(__file__).parent.parent.parent
GIB = 1 << 30
GPU: dict[str, Any] = dict(device="cuda", max_num_seqs=4, max_num_batched_tokens=512)
RANKS: dict[str, Any] = GPU | dict(tensor_parallel_size=2)
PROMPTS = [prompt(text(10)), prompt(text(20, 1))]
EAGER_OR_GRAPHS = pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens of one rank."""
    return tokens(folder, **GPU)


@pytest.fixture
def memory_comes_back(expected: list[list[int]]) -> Iterator[None]:
    """What is free on both GPUs before a test is free again after it."""
    before = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
    yield
    torch.cuda.empty_cache()
    for index, free in enumerate(before):
        assert torch.cuda.mem_get_info(index)[0] > free - GIB, f"GPU {index}"


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    with make_llm(folder, **options) as llm:
        return [output["token_ids"] for output in run(llm, PROMPTS, greedy(8))]


@pytest.mark.usefixtures("memory_comes_back")
@EAGER_OR_GRAPHS
def test_a_killed_rank_is_named_and_a_new_engine_starts_at_once(
        folder: Path, expected: list[list[int]], enforce_eager: bool) -> None:
    with make_llm(folder, enforce_eager=enforce_eager, **RANKS) as llm:        # whose cache fills both GPUs
        pids = rank_ids(llm)
        llm.generate([text(10)] * 3, greedy(3), use_tqdm=False)         # compiles what is killed in the midst of
        message, seconds = generate_fails(llm, llm.runner.ranks.processes[1].kill)
        print(f"a rank was killed, and generate raised after {seconds:.2f} s")
        assert "rank 1 was killed by SIGKILL" in message and seconds < 5
        await_end(pids, 1)
    assert tokens(folder, enforce_eager=enforce_eager, **RANKS) == expected


@pytest.mark.usefixtures("memory_comes_back")
def test_an_error_on_the_first_rank_ends_the_other(folder: Path) -> None:
    with make_llm(folder, enforce_eager=False, **RANKS) as llm:
        pids, start = rank_ids(llm), monotonic()
        with mock.patch.object(llm.runner.model, "embed", side_effect=MemoryError("none left")), \
                pytest.raises(RankError, match="rank 0 failed: MemoryError: none left"):
            llm.generate([text(10)], greedy(3), use_tqdm=False)
        assert monotonic() - start < 5
        await_end(pids, 1)


@pytest.mark.usefixtures("memory_comes_back")
def test_a_killed_program_takes_its_rank_along(folder: Path) -> None:
    body = "llm.generate([[5, 6, 7]], params, use_tqdm=False)"
    with program(folder, body, "cuda") as (running, pids):
        sleep(0.3)
        running.kill()
        assert len(pids) == 1
        await_end(pids, 5)


@pytest.mark.usefixtures("memory_comes_back")
def test_engines_on_the_same_gpus_do_not_meet(folder: Path, expected: list[list[int]]) -> None:
    small = RANKS | dict(num_kvcache_blocks=20, enforce_eager=False)
    with make_llm(folder, **small) as one, make_llm(folder, **small) as other:
        for llm in (one, other, one):
            assert [output["token_ids"] for output in run(llm, PROMPTS, greedy(8))] == expected


@pytest.mark.usefixtures("memory_comes_back")
@EAGER_OR_GRAPHS
def test_an_engine_on_each_gpu(folder: Path, expected: list[list[int]], enforce_eager: bool) -> None:
    """Each computes where it was made, whatever device is the current one when it is used."""
    with make_llm(folder, enforce_eager=enforce_eager, **GPU) as first:
        with torch.cuda.device(1):
            second = make_llm(folder, enforce_eager=enforce_eager, **GPU)
        with second:
            assert second.runner.kv_cache.device.index == 1
            for llm in (first, second, first):
                assert [output["token_ids"] for output in run(llm, PROMPTS, greedy(8))] == expected


def test_launched_ranks_take_a_gpu_each(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os
from nanovllm import LLM, SamplingParams
params = SamplingParams(max_tokens=8, top_k=1, ignore_eos=True)
with LLM({str(folder)!r}, tensor_parallel_size=2, max_num_seqs=4, max_num_batched_tokens=512) as llm:
    outputs = llm.generate({[each.token_ids for each in PROMPTS]}, params, use_tqdm=False)
    os.write(1, f"{{llm.runner.device}} {{[output['token_ids'] for output in outputs]}}\\n".encode())
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           str(script)], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"cuda:0 {expected}", "cuda:1 []"]
