"""Messages of any size between the ranks of an engine, pickled once however many ranks get them."""
from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.runner.image_encoder import image_owners
from nanovllm.runner.plan_changes import PlanChanges

LARGE_BYTES = 1 << 16       # buffers of at least this size, such as pixels, travel beside the pickle, not in it


@dataclass(frozen=True)
class Start:
    """The first message to a rank: `build(*args, parallel=..., device=...)` is its runner."""

    build: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    size: int
    port: int
    device: str
    spread_images: bool
    num_threads: int


class Ready:
    """A rank's word that it is where it next meets the others."""


@dataclass(frozen=True)
class Failed:
    """A rank's last word."""

    error: str


class EndCall:
    """Tells a rank that was launched beside the first that the call which all of them made is over."""


class Close:
    """Tells a rank to give its memory back and end."""


@dataclass(frozen=True)
class Packed:
    """A pickled message; `buffers` are not copied, so what they belong to must not change before it is sent."""

    head: bytes
    buffers: list[memoryview]


def pack(message: object) -> Packed:
    """Any picklable object, made ready for `send`."""
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE_BYTES:
            buffers.append(raw)
        return raw.nbytes < LARGE_BYTES

    pickled = pickle.dumps(message, protocol=5, buffer_callback=keep_inside)
    return Packed(pickle.dumps((pickled, [raw.nbytes for raw in buffers])), buffers)


def send(connection: Connection, message: Packed) -> None:
    """Waits until the other end has taken what its buffer does not hold; OSError once that end is closed."""
    connection.send_bytes(message.head)
    for buffer in message.buffers:
        rest = buffer
        while rest:
            rest = rest[os.write(connection.fileno(), rest):]


def receive(connection: Connection) -> Any:
    """The next message; EOFError or OSError once the other end is closed."""
    pickled, sizes = pickle.loads(connection.recv_bytes())
    buffers = [np.empty(size, np.uint8) for size in sizes]
    for buffer in buffers:
        rest = buffer.data
        while rest:         # straight into place: `Connection` takes four times as long, by way of copies
            num_bytes = os.readv(connection.fileno(), [rest])
            if not num_bytes:
                raise EOFError
            rest = rest[num_bytes:]
    return pickle.loads(pickled, buffers=buffers)


# ---------------------------------------------------------------- plans

def pack_plan(plan: PlanChanges, size: int, spread_images: bool) -> list[Packed]:
    """The plan as ranks 1 to size - 1 get it: with the pixels of those images alone that the rank encodes by itself."""
    if not plan.encodes or not spread_images:
        return [pack(replace(plan, encodes=tuple(replace(each, pixels=None) for each in plan.encodes)))] * (size - 1)
    owners = image_owners(plan.encodes, size)
    return [pack(replace(plan, encodes=tuple(
        replace(each, pixels=portable(each.pixels) if owner == rank else None)
        for each, owner in zip(plan.encodes, owners)))) for rank in range(1, size)]


def portable(pixels: Any) -> Any:
    """Pixels in a form whose pickle holds them and nothing else: a tensor's would hold all it is a view of."""
    if not isinstance(pixels, Tensor):
        return np.ascontiguousarray(pixels)
    return pixels.clone() if pixels.dtype == torch.bfloat16 else pixels.contiguous().numpy()     # numpy has no bfloat16
