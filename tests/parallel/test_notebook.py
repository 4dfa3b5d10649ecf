"""In a notebook ranks live from cell to cell: `__main__` has no file, and the last error is kept with its frames."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoints import make_qwen3

ROOT = Path(__file__).parent.parent.parent
# Runs cells as a kernel does; an error ends its cell alone, and stays in sys.last_traceback.
KERNEL = """
import __main__, code, sys
assert not hasattr(__main__, "__file__")
kernel = code.InteractiveInterpreter(vars(__main__))
for cell in sys.argv[1:]:
    kernel.runcode(compile(cell, "<cell>", "exec"))
"""
START = """
from nanovllm import LLM, SamplingParams
params = SamplingParams(max_tokens=4, top_k=1, ignore_eos=True)
llm = LLM({folder!r}, device="cpu", tensor_parallel_size=2, kvcache_memory_gb=0.05)
"""
GENERATE = 'print(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"])'
KILL = "llm.runner.ranks.processes[1].kill(); llm.runner.ranks.processes[1].wait()"


def test_an_engine_lives_from_cell_to_cell_and_is_made_anew_after_a_rank_has_died(tmp_path: Path) -> None:
    start = START.format(folder=str(make_qwen3(tmp_path)))
    cells = [start, GENERATE, GENERATE, KILL, GENERATE, "print(sys.last_traceback is not None)", start, GENERATE]
    done = subprocess.run([sys.executable, "-c", KERNEL, *cells], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    tokens, *others = done.stdout.splitlines()
    assert others == [tokens, "True", tokens] and done.returncode == 0
    assert "RankError: rank 1 was killed by SIGKILL" in done.stderr
