"""Settings that every test shares."""
from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)      # models this small only wait for their threads


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no GPU, those marked `multi_gpu` where there are fewer than two."""
    for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
        if torch.cuda.device_count() < needed:
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPUs"))
