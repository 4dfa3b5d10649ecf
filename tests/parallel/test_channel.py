"""Messages arrive whole whatever their size, and pixels only where they are encoded."""
from __future__ import annotations

import threading
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.plan import ImageEncode
from nanovllm.runner.channel import Packed, pack, pack_plan, portable, receive, send
from nanovllm.runner.plan_changes import NO_BLOCKS, PlanChanges


def through(message: Packed) -> Any:
    ours, theirs = Pipe()
    sender = threading.Thread(target=send, args=(ours, message))
    sender.start()
    received = receive(theirs)
    sender.join()
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
    return received


@pytest.mark.parametrize("size", [0, 1, 10_000, 3_000_000])
def test_arrays_of_any_size(size: int) -> None:
    small, large = np.arange(3), np.arange(size, dtype=np.float32)
    received = through(pack({"a": large, "b": [small, large[::2]]}))
    assert np.array_equal(received["a"], large) and np.array_equal(received["b"][1], large[::2])
    assert received["a"].flags.writeable        # torch takes no other without a warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_view_of_pixels_brings_nothing_else(dtype: torch.dtype) -> None:
    everything = torch.randn(1000, 50).to(dtype)
    for view in (everything[10:20], everything[:, ::2][:20]):
        packed = pack(portable(view))
        assert len(packed.head) + sum(map(len, packed.buffers)) < 4 * view.numel() + 2000
        assert torch.equal(torch.as_tensor(through(packed)), view)
    array = np.ones((4, 6))
    assert np.array_equal(through(pack(portable(array[:, ::2]))), array[:, ::2])


def plan_of(*grids: tuple[int, int, int]) -> PlanChanges:
    encodes = tuple(ImageEncode(i, grid, torch.full((np.prod(grid), 4), float(i)), None, i)
                    for i, grid in enumerate(grids))
    return PlanChanges((), (), NO_BLOCKS, encodes, (), ())


def sent(plan: PlanChanges, size: int, spread_images: bool) -> list[PlanChanges]:
    return [through(message) for message in pack_plan(plan, size, spread_images)]


def test_no_pixels_for_a_split_tower_whose_ranks_have_them_from_each_other() -> None:
    plan = plan_of((1, 2, 2), (1, 4, 4))
    for received in sent(plan, 3, False):
        assert [(encode.grid, encode.pixels) for encode in received.encodes] == [((1, 2, 2), None), ((1, 4, 4), None)]


def test_spread_images_go_to_the_rank_that_encodes_them() -> None:
    plan = plan_of((1, 2, 2), (1, 4, 4), (1, 8, 8), (1, 4, 4))
    second, third = sent(plan, 3, True)
    assert [encode.pixels is not None for encode in second.encodes] == [True, True, False, False]
    assert [encode.pixels is not None for encode in third.encodes] == [False, False, False, True]
    assert [encode.grid for encode in second.encodes] == [encode.grid for encode in plan.encodes]
