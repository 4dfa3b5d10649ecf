"""The Ray example answers every line once, also when an engine dies, and reuses pictures across the cluster."""
from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.pictures import draw_shapes
from tests.checkpoints import make_qwen2_5_vl

ray = pytest.importorskip("ray", reason="needs the extra nanovllm[ray]")
ROOT = Path(__file__).parent.parent.parent
OPTIONS = dict(device="cpu", recompute_ratio=0.05, kvcache_memory_gb=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, 6 pictures and 24 questions about them."""
    folder = tmp_path_factory.mktemp("ray")
    make_qwen2_5_vl(folder / "model")
    for number in range(6):
        draw_shapes(112, 112, seed=number).save(folder / f"{number}.png")
    lines = [json.dumps(dict(id=number, image=str(folder / f"{number % 6}.png"), question=f"what is {number}?"))
             for number in range(24)]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def answered(folder: Path, **options: Any) -> Iterator[dict[str, Any]]:
    from examples import ray_batch
    return ray_batch.answers(str(folder / "questions.jsonl"), str(folder / "model"), actors=2, max_tokens=3,
                             options=OPTIONS, **options)


@pytest.mark.usefixtures("cluster")
def test_a_picture_is_computed_once_and_a_killed_engine_loses_nothing(folder: Path) -> None:
    rows: list[dict[str, Any]] = []
    for row in answered(folder):
        if not rows:
            os.kill(row["actor"], signal.SIGKILL)
        rows.append(row)
    assert sorted(row["id"] for row in rows) == list(range(24))
    assert all(row["answer"] and row["num_prompt_tokens"] > 16 for row in rows)
    for picture in {row["picture"] for row in rows}:
        alike = [row for row in rows if row["picture"] == picture]
        assert len({row["actor"] for row in alike}) == 1
        assert sum(row["num_reused_tokens"] + row["num_cached_tokens"] == 0 for row in alike) == 1


@pytest.mark.usefixtures("cluster")
def test_without_affinity_pictures_are_computed_on_every_engine(folder: Path) -> None:
    rows = list(answered(folder, affinity=False))
    assert sorted(row["id"] for row in rows) == list(range(24))
    assert any(len({row["actor"] for row in rows if row["picture"] == picture}) > 1
               for picture in {row["picture"] for row in rows})
