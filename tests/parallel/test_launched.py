"""Ranks that torchrun starts: all make the same calls, and the first returns the outputs."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.parallel import launched_rank
from tests.checkpoints import make_qwen3

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import os, sys, torch
from nanovllm import LLM, SamplingParams
rank, folder, says = int(os.environ["RANK"]), sys.argv[1], []
params = SamplingParams(max_tokens=4, top_k=1, ignore_eos=True)
def engine(size):
    return LLM(folder, device="cpu", tensor_parallel_size=size, kvcache_memory_gb=0.05)
with engine(1) as alone, engine(2) as llm:
    expected = [output["token_ids"] for output in alone.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)]
    for _ in range(2):
        outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        says.append([output["token_ids"] for output in outputs] == (expected if rank == 0 else []))
    try:
        llm.generate([[5, 10**9]], params, use_tqdm=False)      # refused by rank 0; the other goes on
    except ValueError:
        says.append(rank == 0)
    else:
        says.append(rank == 1)
    if rank == 1:
        try:
            llm.add_request([5], params)
        except RuntimeError as error:
            says.append("only rank 0" in str(error))
torch.distributed.init_process_group("gloo")
with engine(2) as llm:          # over the store of a group that is there
    says.append(len(llm.generate([[5, 6]], params, use_tqdm=False)) == 1 - rank)
    if rank == 1:
        llm.runner.model.embed = None       # fails in the next call
    try:
        llm.generate([[5, 6]], params, use_tqdm=False)
    except (RuntimeError, TypeError) as error:
        says.append("rank 1 failed: TypeError" in str(error) or rank == 1)
os.write(1, f"{rank} {says}\\n".encode())
"""


def test_launched_ranks_make_calls_together(tmp_path: Path) -> None:
    folder, script = make_qwen3(tmp_path / "model"), tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(folder)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", f"0 {[True] * 5}", f"1 {[True] * 6}"]


def test_the_number_of_launched_processes_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_rank(2) is None
    monkeypatch.setenv("RANK", "3")
    assert launched_rank(4) == 3
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but WORLD_SIZE=4"):
        launched_rank(2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched_rank(2) is None
