"""Runs Python with Triton's interpreter in place of its compiler, so that kernels work on CPU tensors."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, **env: str) -> None:
    """Runs `code` in a process of its own; fails with what it wrote to stderr."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run_interpreted(module: str, function: str) -> None:
    """Calls `function` of a test module; in a process of its own, since Triton decides at import how to run kernels."""
    pytest.importorskip("triton")
    run_python(f"import torch; torch.set_num_threads(1)\nfrom {module} import {function}; {function}()",
               TRITON_INTERPRET="1")
