"""A rank that fails or is killed is named within seconds, and nothing of an engine outlives it, however it ends."""
from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from unittest import mock

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.plan import StepPlan
from nanovllm.runner.workers import RankError
from tests.checkpoints import make_qwen3
from tests.engines import greedy, make_llm
from tests.prompts import text

ROOT = Path(__file__).parent.parent.parent
LONG = 3000                 # tokens that take far longer than any of these tests
# What an embedding program looks like: no main guard. It prints the ids of its ranks and generates until it is ended.
PROGRAM = """
import sys
from nanovllm import LLM, SamplingParams
llm = LLM({folder!r}, device={device!r}, tensor_parallel_size=2, kvcache_memory_gb=0.05, max_num_seqs=4,
          max_num_batched_tokens=512)
print(*[process.pid for process in llm.runner.ranks.processes.values()], flush=True)
params = SamplingParams(max_tokens={tokens}, top_k=1, ignore_eos=True)
{body}
"""
GENERATE = "llm.generate([[5, 6, 7]], params, use_tqdm=False)"
AFTER_CTRL_C = f"""
try:
    {GENERATE}
except KeyboardInterrupt:
    outputs = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    print(len(outputs[0]["token_ids"]))
llm.add_request([5, 6, 7], params)
for _ in range(9):
    llm.step()
sys.exit(3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("text"))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def await_end(pids: list[int], seconds: float) -> None:
    deadline = monotonic() + seconds
    while any(map(is_alive, pids)):
        assert monotonic() < deadline, f"of {pids}, some live on"
        sleep(0.02)


def rank_ids(llm: LLM) -> list[int]:
    return [process.pid for process in llm.runner.ranks.processes.values()]


def generate_fails(llm: LLM, cause: Callable[[], object], seconds_before: float = 0.3) -> tuple[str, float]:
    """The message of `generate`'s error, and the seconds from `cause`, called in its midst, to it."""
    caused: list[float] = []

    def later() -> None:
        sleep(seconds_before)
        caused.append(monotonic())
        cause()

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(RankError) as raised:
        llm.generate([text(10)] * 3, greedy(LONG), use_tqdm=False)
    seconds = monotonic() - caused[0]
    thread.join()
    return str(raised.value), seconds


def test_a_killed_rank_is_named_and_a_new_engine_starts_at_once(folder: Path) -> None:
    with make_llm(folder, tensor_parallel_size=4) as llm:
        pids, victim = rank_ids(llm), llm.runner.ranks.processes[2]
        message, seconds = generate_fails(llm, victim.kill)
        assert "rank 2 was killed by SIGKILL" in message and seconds < 5
        await_end(pids, 1)
        with pytest.raises(RankError, match="rank 2 was killed.*\n.*make a new LLM"):
            llm.generate([text(5)], greedy(2), use_tqdm=False)
        assert not llm.requests and llm.scheduler.is_finished()
    with make_llm(folder, tensor_parallel_size=2) as llm:
        assert len(llm.generate([text(5)], greedy(2), use_tqdm=False)[0]["token_ids"]) == 2


def test_a_rank_that_fails_is_named_with_its_error(folder: Path) -> None:
    with make_llm(folder, tensor_parallel_size=2) as llm:
        tell, steps = llm.runner.ranks.tell, iter(range(10))

        def garble_third(plan: StepPlan) -> None:
            tell(replace(plan, logits_rows=np.array([10**6])) if next(steps) == 2 else plan)

        with mock.patch.object(llm.runner.ranks, "tell", garble_third), \
                pytest.raises(RankError, match="rank 1 failed: IndexError: index .* out of"):
            llm.generate([text(10)], greedy(LONG), use_tqdm=False)


def test_an_error_on_the_first_rank_ends_the_others(folder: Path) -> None:
    with make_llm(folder, tensor_parallel_size=2) as llm:
        pids = rank_ids(llm)
        with mock.patch.object(llm.runner.model, "embed", side_effect=MemoryError("none left")), \
                pytest.raises(RankError, match="rank 0 failed: MemoryError: none left"):
            llm.generate([text(10)], greedy(3), use_tqdm=False)
        await_end(pids, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kept_error_keeps_no_device_memory(folder: Path, ranks: int) -> None:
    """Its traceback has frames that refer to the weights, as a notebook's last error does."""
    with make_llm(folder, tensor_parallel_size=ranks) as llm:
        weights = list(llm.runner.model.parameters())
        with mock.patch.object(llm.runner.model, "compute_logits", side_effect=MemoryError("none left")), \
                pytest.raises((RankError, MemoryError)) as kept:
            llm.generate([text(10)], greedy(3), use_tqdm=False)
    assert "none left" in str(kept.value) and not any(weight.untyped_storage().nbytes() for weight in weights)


def test_an_engine_that_cannot_be_made_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    broken = make_qwen3(tmp_path)
    (broken / "model.safetensors").unlink()
    for path, options in ((broken, {}), (folder, dict(kvcache_memory_gb=1e-6))):
        with children_end(), pytest.raises((FileNotFoundError, ValueError), match="safetensors|no room for a KV"):
            make_llm(path, tensor_parallel_size=2, **options)
    with children_end(), mock.patch("nanovllm.engine.llm_engine.Scheduler", side_effect=KeyboardInterrupt), \
            pytest.raises(KeyboardInterrupt):
        make_llm(folder, tensor_parallel_size=2)


def test_close_and_garbage_collection_leave_no_process(folder: Path) -> None:
    for end in (LLM.exit, lambda _: None):
        with children_end():
            llm = make_llm(folder, tensor_parallel_size=2)
            end(llm)
            end(llm)
            del llm
            gc.collect()


class children_end:
    """The block leaves no child process of this one, and no thread that watches any."""

    def __enter__(self) -> None:
        self.before = children()

    def __exit__(self, *_: object) -> None:
        assert children() == self.before
        assert "nanovllm-ranks" not in [thread.name for thread in threading.enumerate()]


def children() -> list[str]:
    threads = Path("/proc/self/task").iterdir()
    return [pid for thread in threads for pid in (thread / "children").read_text().split()]


@contextmanager
def program(folder: Path, body: str, device: str = "cpu") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program read from standard input, and its ranks."""
    running = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    assert running.stdin is not None and running.stdout is not None
    try:
        running.stdin.write(PROGRAM.format(folder=str(folder), device=device, tokens=LONG, body=body))
        running.stdin.close()
        yield running, [int(pid) for pid in running.stdout.readline().split()]
    finally:
        running.kill()
        running.wait()


def test_a_killed_program_takes_its_ranks_along(folder: Path) -> None:
    with program(folder, GENERATE) as (running, pids):
        sleep(0.3)
        running.kill()
        assert len(pids) == 1
        await_end(pids, 5)


def test_after_ctrl_c_the_engine_goes_on_and_an_exit_amid_steps_leaves_nothing(folder: Path) -> None:
    with program(folder, AFTER_CTRL_C) as (running, pids):
        assert running.stdout is not None and running.stderr is not None
        sleep(0.5)
        os.killpg(running.pid, signal.SIGINT)           # as a terminal does: to the ranks, too
        assert (running.wait(30), running.stdout.read(), running.stderr.read()) == (3, "6\n", "")
        await_end(pids, 1)


def test_ranks_that_never_start_are_given_up(folder: Path) -> None:
    with children_end(), mock.patch("nanovllm.runner.workers.BOOTSTRAP", "import sys; sys.exit(7)"), \
            pytest.raises(RankError, match="rank 1 ended with exit code 7"):
        make_llm(folder, tensor_parallel_size=2)
    with children_end(), mock.patch("nanovllm.runner.workers.BOOTSTRAP", "import time; time.sleep(60)"), \
            mock.patch("nanovllm.runner.workers.START_SECONDS", 0.5), \
            pytest.raises(RankError, match="only 0 of 1 ranks started"):
        make_llm(folder, tensor_parallel_size=2)


SAYS_READY_AND_ENDS = """
import sys
from multiprocessing.connection import Connection
from nanovllm.runner.channel import Ready, pack, receive, send
connection = Connection(int(sys.argv[1]))
receive(connection)
send(connection, pack(Ready()))
"""


def test_a_rank_that_dies_before_it_meets_the_others(folder: Path) -> None:
    start = monotonic()
    with children_end(), mock.patch("nanovllm.runner.workers.BOOTSTRAP", SAYS_READY_AND_ENDS), \
            pytest.raises(RankError, match="rank 1 ended with exit code 0"):
        make_llm(folder, tensor_parallel_size=2)
    assert monotonic() - start < 30
