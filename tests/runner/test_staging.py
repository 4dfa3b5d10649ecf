"""Nested host tensors arrive together, each in its place, and as copies."""
from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanovllm.runner.staging import ALIGNMENT, packed_bytes, packed_views, to_device


@dataclass(frozen=True)
class Leaf:
    ids: Tensor
    lengths: tuple[int, ...]
    scale: Tensor | None


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_tensor_arrives_in_its_place(name):
    column = torch.arange(6, dtype=torch.int32).view(3, 2).T        # not contiguous
    tree = (Leaf(torch.arange(5), (3, 1), torch.rand(3, 1)), [Leaf(torch.empty(0, 4), (), None), (column, None)], (),
            "x")
    leaf, (empty, (moved, nothing)), unit, text = to_device(tree, torch.device(name))
    assert torch.equal(leaf.ids.cpu(), tree[0].ids) and torch.equal(leaf.scale.cpu(), tree[0].scale)
    assert leaf.lengths == (3, 1) and empty.ids.shape == (0, 4) and empty.scale is nothing is None
    assert torch.equal(moved.cpu(), column) and moved.dtype == torch.int32
    assert (unit, text) == ((), "x")
    assert {x.device.type for x in (leaf.ids, leaf.scale, empty.ids, moved)} == {name}
    assert leaf.ids.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr(), "one transfer"
    leaf.ids.fill_(7)
    moved.fill_(7)
    assert tree[0].ids.tolist() == [0, 1, 2, 3, 4] and column.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert float(leaf.scale.sum()) == pytest.approx(float(tree[0].scale.sum()))


def test_one_tensor_and_none_at_all():
    alone = torch.rand(3)
    moved = to_device(alone, torch.device("cpu"))
    assert torch.equal(moved, alone) and moved.data_ptr() != alone.data_ptr()
    assert to_device((None, []), torch.device("cpu")) == (None, [])


def test_packed_arrays_are_aligned_and_apart():
    shapes = [(torch.int32, (3,)), (torch.int64, (2, 2)), (torch.float32, (1,))]
    buffer = torch.zeros(packed_bytes(shapes), dtype=torch.uint8)
    views = packed_views(buffer, shapes)
    for value, view in enumerate(views, 1):
        view.fill_(value)
    assert [view.unique().tolist() for view in views] == [[1], [2], [3]]
    assert all((view.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 for view in views)
