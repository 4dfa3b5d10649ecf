"""Settings that every test shares."""
from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)      # models this small only wait for their threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
