"""Other engines on the same work: which of them are here, and those that run in a process of their own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.generation import TEMPERATURE, WARM_UP_OUTPUT, Work
from benchmarks.models import ModelFolder
from benchmarks.report import Result

PACKAGES = {"transformers": "transformers", "vllm": "vllm", "nano-vllm": "nanovllm"}     # by name on PyPI
ROOT = Path(__file__).parent.parent


def parse_peers(names: str) -> list[str]:
    """Names of peers, with commas between them, from a command line."""
    peers = names.split(",")
    if unknown := [name for name in peers if name not in PACKAGES]:
        raise ArgumentTypeError(f"unknown peers {unknown}: known are {', '.join(PACKAGES)}")
    return peers


def installed(names: Iterable[str]) -> list[str]:
    """Those that are installed here; says which are not."""
    found = []
    for name in names:
        try:
            distribution(name)
            found.append(name)
        except PackageNotFoundError:
            print(f"{name} is not installed here, and is left out of the comparison")
    return found


class ProcessPeer:
    """vLLM or nano-vllm, whose package has the name of ours: both run where ours is not on the path."""

    def __init__(self, name: str, folder: ModelFolder) -> None:
        self.name, self.folder = name, folder

    def measure(self, todo: Sequence[tuple[int | None, Work]], mode: str) -> list[Result]:
        """All of the work by one engine, after a warm-up on prompts of the same lengths.

        Raises RuntimeError with the end of what it has printed if the engine fails.
        """
        dummy = self.name == "vllm" and self.folder.weights == "dummy"
        job = dict(model=self.folder.path, options={"load_format": "dummy"} if dummy else {}, temperature=TEMPERATURE,
                   warm_up_output=WARM_UP_OUTPUT, works=[(work.prompts, work.output_lens) for _, work in todo])
        script = (Path(__file__).parent / "peer_process.py").read_text(encoding="utf-8")
        with TemporaryDirectory() as elsewhere:
            done = subprocess.run([sys.executable, "-c", script, PACKAGES[self.name]], input=json.dumps(job), text=True,
                                  cwd=elsewhere, env=self._environment(), capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name} failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-20:]))
        return [Result(mode, self.name, len(work.prompts), seconds, seed=seed,
                       output_tok_per_s=work.num_output_tokens / seconds, call_ms=1e3 * seconds)
                for (seed, work), seconds in zip(todo, json.loads(done.stdout.splitlines()[-1]))]

    def _environment(self) -> dict[str, str]:
        """Ours, with the peer's own folder first on the path, and this repository not on it."""
        folders = [str(distribution(self.name).locate_file(""))]
        folders += [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)
                    if folder and Path(folder).resolve() != ROOT]
        return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, folders))}
