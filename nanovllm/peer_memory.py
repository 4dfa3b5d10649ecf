"""Memory that all GPUs of one host write to directly, for sums over ranks that a library is too slow to start."""
from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import Store, _SymmetricMemory

BLOCK_BYTES = 4096                  # of a tensor that one program sums
MAX_BLOCKS = 512
MAX_SUM_BYTES = BLOCK_BYTES * MAX_BLOCKS
FAR_AHEAD = 1 << 30                 # sums
WAIT = timedelta(seconds=20)        # for the other ranks to map the memory


@dataclass(frozen=True)
class PeerMemory:
    """One buffer a rank: a counter for each (block, rank that writes to it), then for even and for odd sums a place
    for what each rank sends. `kernels.sum_ranks` says how they are used."""

    addresses: Tensor           # int64 [ranks] where each rank's buffer is seen from this device
    flags: Tensor               # int32 [MAX_BLOCKS, ranks] in this rank's buffer: sums that the others have sent
    counts: Tensor              # int32 [MAX_BLOCKS] sums that this rank has done
    ahead: Tensor               # int32 [MAX_BLOCKS, 1], only used by `release`
    stream: torch.cuda.Stream
    mapping: Any                # keeps the memory of the other ranks mapped

    def release(self) -> None:
        """Lets this rank's sums end though other ranks send nothing any more, from any thread; what they give is of no
        use. Nothing is allocated or loaded here, which could wait for the very kernels that wait."""
        with torch.cuda.device(self.flags.device), torch.cuda.stream(self.stream):
            torch.add(self.counts.unsqueeze(1), FAR_AHEAD, out=self.ahead)
            self.flags.copy_(self.ahead.expand_as(self.flags))


def buffer_bytes(ranks: int) -> int:
    """Bytes of each rank's buffer."""
    return MAX_BLOCKS * ranks * torch.int32.itemsize + 2 * ranks * MAX_SUM_BYTES


def share_memory(store: Store, rank: int, size: int, device: torch.device) -> PeerMemory:
    """Maps the buffers of all ranks; each of them calls it, and none may use it before all have come back.

    Raises RuntimeError where GPUs cannot map each other's memory, or would use NVLink multicast for it: that is never
    asked for, since a program that ends in its midst can put the GPUs of a host out of service.
    """
    name = secrets.token_hex(8)         # known in this process only
    meeting = _Meeting(store)           # to be kept: C++ refers to the part of it that is not Python's
    with environment(TORCH_SYMM_MEM_DISABLE_MULTICAST="1"):
        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
            raise RuntimeError("NVLink multicast is not to be used, and torch does not turn it off")
        _SymmetricMemory.set_group_info(name, rank, size, meeting)
        buffer = _SymmetricMemory.empty_strided_p2p((buffer_bytes(size),), (1,), torch.uint8, device, None)
        mapping = _SymmetricMemory.rendezvous(buffer, name)
    flags = buffer[:MAX_BLOCKS * size * torch.int32.itemsize].view(torch.int32).view(MAX_BLOCKS, size)
    counts, ahead = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in (MAX_BLOCKS, (MAX_BLOCKS, 1)))
    memory = PeerMemory(torch.tensor(mapping.buffer_ptrs, dtype=torch.int64, device=device), flags, counts, ahead,
                        torch.cuda.Stream(device), (mapping, meeting))
    torch.cuda.synchronize(device)
    memory.release()                    # loads what it runs
    torch.cuda.synchronize(device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    return memory


class _Meeting(Store):
    """A store as torch's rendezvous of symmetric memory needs it here. Its keys, `name/number/rank`, are numbered by
    the process, of which rank 0's may have made more engines than the others': here they are numbered by the engine.
    And it waits for seconds, not minutes."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.first: int | None = None

    def set(self, key: str, value: Any) -> None:       # bytes
        self.store.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self.store.get(self._renumbered(key))

    def wait(self, keys: list[str], *_: Any) -> None:
        self.store.wait([self._renumbered(key) for key in keys], WAIT)

    def _renumbered(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if self.first is None:
            self.first = int(number)
        return f"peer memory/{name}/{int(number) - self.first}/{rank}"


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables for what is made in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
