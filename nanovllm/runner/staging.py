"""Small arrays on their way to the device: packed side by side, carried by one copy that the host does not wait for."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

Shape = tuple[torch.dtype, tuple[int, ...]]
T = TypeVar("T")

ALIGNMENT = 16      # bytes, of each array
HOST_BUFFERS = 3    # steps in flight, and one to fill


def packed_bytes(shapes: Sequence[Shape]) -> int:
    """Bytes that arrays of these dtypes and shapes take."""
    return sum(_padded(dtype.itemsize * prod(shape)) for dtype, shape in shapes)


def packed_views(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The arrays one behind the other in a byte buffer."""
    views, offset = [], 0
    for dtype, shape in shapes:
        num_bytes = dtype.itemsize * prod(shape)
        views.append(buffer[offset:offset + num_bytes].view(dtype).view(shape))
        offset += _padded(num_bytes)
    return views


def to_device(tree: T, device: torch.device) -> T:
    """`tree`, a host tensor or a dataclass, tuple or list of such, with copies on the device in their places.

    One transfer carries all of them; to a GPU from pinned memory, so that the host need not wait. All else stays as it
    is, a sequence that begins with a number whole.
    """
    tensors = list(_tensors(tree))
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    host = torch.empty(packed_bytes(shapes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for view, tensor in zip(packed_views(host, shapes), tensors):
        view.copy_(tensor)
    moved: T = _with_tensors(tree, iter(packed_views(host.to(device, non_blocking=True), shapes)))
    return moved


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in _parts(tree):
            yield from _tensors(part)


def _with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """`tree` with the next of `tensors` in the place of each that `_tensors` finds, in the same order."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if not (parts := _parts(tree)):
        return tree
    parts = [_with_tensors(part, tensors) for part in parts]
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **dict(zip((field.name for field in fields(tree)), parts)))
    return type(tree)(parts)


def _parts(tree: Any) -> Sequence[Any]:
    if is_dataclass(tree):
        return [getattr(tree, field.name) for field in fields(tree)]
    if not isinstance(tree, (tuple, list)) or (tree and isinstance(tree[0], int)):      # lengths, as many as spans
        return ()
    return tree


class StagingBuffer:
    """A byte buffer on a GPU that keeps its address, and pinned buffers that are filled and sent to it in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host = [(torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True), torch.cuda.Event())
                     for _ in range(HOST_BUFFERS)]
        self.turn = 0

    def next_host_bytes(self) -> Tensor:
        """Host memory to fill; what it held before has been sent."""
        self.turn = (self.turn + 1) % HOST_BUFFERS
        buffer, sent = self.host[self.turn]
        sent.synchronize()
        return buffer

    def send(self, num_bytes: int) -> None:
        """Copies the first bytes of the host memory just filled to the device."""
        buffer, sent = self.host[self.turn]
        self.device_bytes[:num_bytes].copy_(buffer[:num_bytes], non_blocking=True)
        sent.record()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
