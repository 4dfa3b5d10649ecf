"""Settings that every test shares."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import assert_idle, make_llm
from tests.oracle import Oracle

torch.set_num_threads(1)      # models this small only wait for their threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no GPU, those marked `multi_gpu` where there are fewer than two."""
    for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
        if torch.cuda.device_count() < needed:
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPUs"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language checkpoint."""
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with make_llm(folder, block_size=16) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine with small blocks and empty caches, left as it was found."""
    shared.reset_caches()
    yield shared
    assert_idle(shared)
