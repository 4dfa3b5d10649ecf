"""Small arrays on their way to the device: packed side by side, carried by one copy that the host does not wait for."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Shape = tuple[torch.dtype, tuple[int, ...]]

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


class StagingBuffer:
    """A byte buffer on a GPU that keeps its address, and pinned buffers that are filled and sent to it in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host = [(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
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
