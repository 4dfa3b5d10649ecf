"""The identity of pixels: one 128-bit digest of their bytes, shape, dtype and grid, at memory speed."""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

SLICE_BYTES = 8 << 20       # part of what a digest is: never derived from the machine
MIN_PARALLEL_SLICES = 3     # below 16 MiB (0.5 ms) starting threads costs more than it saves
MAX_THREADS = 8             # a few cores fill the memory bus
NUM_SAMPLES = 4096          # values in a fingerprint


def hash_threads() -> ThreadPoolExecutor:
    """Threads for `content_hash`; they start when first needed and end when nobody refers to the pool any more."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS))


def content_hash(pixels: Any, grid: Sequence[int], threads: Executor | None = None) -> int:
    """128-bit digest of `pixels` (tensor on any device or numpy array, any shape and dtype) under `grid` (t, h, w).

    Equal pixels have equal digests whether they come as tensor or array, contiguous or not, in every process and
    for any number of threads. It guards against accidents, not against people who construct collisions.
    """
    slices = _slices(pixels)
    if len(slices) < MIN_PARALLEL_SLICES:
        return _digest_of(pixels, grid, map(xxhash.xxh3_128_digest, slices))
    return PendingHash(pixels, grid, threads or hash_threads()).wait()


class PendingHash:
    """A `content_hash` that threads work on while the caller does something else."""

    def __init__(self, pixels: Any, grid: Sequence[int], threads: Executor) -> None:
        self.pixels, self.grid = pixels, grid
        # xxhash lets go of the GIL while it reads a slice
        self.digests = [threads.submit(xxhash.xxh3_128_digest, part) for part in _slices(pixels)]

    def wait(self) -> int:
        return _digest_of(self.pixels, self.grid, (digest.result() for digest in self.digests))


def fingerprint(pixels: Any, grid: Sequence[int]) -> int:
    """Digest of shape, dtype, grid and 4,096 values spread over `pixels`: tells most different pixels apart in
    microseconds, whatever their size (a non-contiguous input is copied first)."""
    values = _flat_bytes(pixels).view(f"u{pixels.itemsize}")
    if len(values) > NUM_SAMPLES:
        # One value of each of 4,096 equal stretches, at a place in it that wanders: an even stride could stay in
        # one column of every patch.
        stretch = len(values) // NUM_SAMPLES
        index = np.arange(NUM_SAMPLES)
        values = values[index * len(values) // NUM_SAMPLES + index * 2654435761 % stretch]
    return xxhash.xxh3_128_intdigest(_header(pixels, grid) + values.tobytes())


def _slices(pixels: Any) -> list[memoryview]:
    data = _flat_bytes(pixels).data        # a memoryview: slices of it copy nothing
    return [data[first:first + SLICE_BYTES] for first in range(0, len(data), SLICE_BYTES)]


def _digest_of(pixels: Any, grid: Sequence[int], digests: Iterable[bytes]) -> int:
    """The whole digest, of those of the slices."""
    return xxhash.xxh3_128_intdigest(_header(pixels, grid) + b"".join(digests))


def _header(pixels: Any, grid: Sequence[int]) -> bytes:
    """What a digest covers beside the bytes; `repr` separates the fields, "torch.float32" and "float32" are one."""
    dtype = str(pixels.dtype).removeprefix("torch.")
    return repr((tuple(pixels.shape), dtype, tuple(int(size) for size in grid))).encode() + b"\0"


def _flat_bytes(pixels: Any) -> NDArray[np.uint8]:
    """The bytes of a tensor or array in row-major order, shared with it when it lies so in host memory."""
    if isinstance(pixels, np.ndarray):
        return np.ascontiguousarray(pixels).reshape(-1).view(np.uint8)
    flat = pixels.detach().cpu().contiguous().reshape(-1)
    uint8 = flat[:0].byte().dtype        # torch.uint8, without importing torch
    data: NDArray[np.uint8] = flat.view(uint8).numpy()       # as bytes, since numpy has no bfloat16
    return data
