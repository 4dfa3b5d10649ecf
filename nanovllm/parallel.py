"""One rank's place in tensor parallelism: its share of every size, and what it sends to and gets from the others."""
from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from nanovllm.peer_memory import BLOCK_BYTES, MAX_SUM_BYTES, PeerMemory, environment, share_memory

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)     # of a rank that waits for another one


class Group(Protocol):
    """What a rank needs of a backend of torch.distributed; a call returns work to wait for, or None if it is done."""

    def allreduce(self, tensors: list[Tensor], options: Any, /) -> dist.Work | None: ...
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any, /) -> dist.Work | None: ...
    def broadcast(self, tensors: list[Tensor], options: Any, /) -> dist.Work | None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Part:
    """The stretch [start, stop) of an axis of `total` that a rank keeps; in its tensors it has `size`, zeros behind."""

    total: int
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class TensorParallel:
    """A rank of `size`, given to whatever is split; every rank makes the same calls in the same order.

    `group` connects the ranks; None where there is only one, and then every call returns what it was given. With
    `spread_images` the vision tower is whole on every rank, and each encodes other images. Where the ranks are GPUs
    that map each other's memory, `peers` is it, and `sum_small` a kernel that sums a few MB through it sooner than the
    group does: `kernels.sum_ranks.sum_ranks`.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None
    spread_images: bool = False
    peers: PeerMemory | None = None
    sum_small: SumSmall | None = None

    @property
    def vision(self) -> TensorParallel:
        """What the vision tower is split by."""
        return ALONE if self.spread_images else self

    def with_small_sums(self, kernel: SumSmall) -> TensorParallel:
        """The same rank, which sums what is small by `kernel`; on every rank or on none."""
        return self if self.peers is None else replace(self, sum_small=kernel)

    # ------------------------------------------------------------ shares

    def split(self, total: int, first: int = 0, among: int | None = None) -> Part:
        """An equal share, rounded up, of the `total` places from `first` on; `among`: length of the whole axis."""
        size = -(-total // self.size)
        start, stop = (min(rank * size, total) for rank in (self.rank, self.rank + 1))
        return Part(total if among is None else among, first + start, first + stop, size)

    def split_kv(self, num_kv_heads: int, head_dim: int) -> Part:
        """The share of key or value heads, in rows; where there are fewer heads than ranks, each has copies."""
        if self.size <= num_kv_heads:
            return self.split(num_kv_heads * head_dim)
        start = self.rank * num_kv_heads // self.size * head_dim
        return Part(num_kv_heads * head_dim, start, start + head_dim, head_dim)

    def num_kv_heads(self, total: int) -> int:
        """KV heads on each rank."""
        return self.split_kv(total, 1).size

    # ------------------------------------------------------------ traffic

    def sum(self, x: Tensor) -> Tensor:
        """x, floats, summed over the ranks, in place: contiguous, of any shape, the same on all of them."""
        if self.peers is not None and self.sum_small is not None and x.nbytes * (self.size - 1) <= MAX_SUM_BYTES:
            self.sum_small(x, self.peers.addresses, self.peers.counts, self.rank, BLOCK_BYTES)
        elif self.group is not None:
            options = dist.AllreduceOptions()
            options.asyncOp = False
            _wait(self.group.allreduce([x], options))
        return x

    def gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """On rank 0 all ranks' x `[rows, n]` side by side, `[rows, size * n]`, in `out` if several ranks fill it; else
        the rank's own x."""
        if self.group is None:
            return x
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = 0, False
        parts = [torch.empty_like(x) for _ in range(self.size if self.rank == 0 else 0)]
        _wait(self.group.gather([parts] if parts else [], [x], options))
        return torch.cat(parts, dim=-1, out=out) if parts else x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """x of rank `source`, written over that of the others: contiguous, of one shape and dtype on all of them."""
        if self.group is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.asyncOp = source, False
            _wait(self.group.broadcast([x], options))
        return x

    def abort(self) -> None:
        """Breaks off whatever this rank waits for, from any thread; the group is of no use any more."""
        self.release()
        if self.group is not None:
            self.group.abort()

    def release(self) -> None:
        """The part of `abort` that has to be done again once the other ranks are gone: until then they may send."""
        if self.peers is not None:
            self.peers.release()

    def smallest(self, values: list[int], device: torch.device) -> list[int]:
        """The smallest of the ranks' numbers, place by place."""
        if self.group is None:
            return values
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp.MIN, False
        numbers = torch.tensor(values, dtype=torch.int64, device=device)
        _wait(self.group.allreduce([numbers], options))
        return numbers.tolist()


SumSmall = Callable[[Tensor, Tensor, Tensor, int, int], None]
ALONE = TensorParallel()


def _wait(work: dist.Work | None) -> None:
    """Until the result may be used; on a GPU that is the current stream's matter, not the host's."""
    if work is not None:
        work.wait()


# ---------------------------------------------------------------- groups

def connect(store: Store, rank: int, size: int, device: torch.device, spread_images: bool) -> TensorParallel:
    """This rank with a group of its own over `store`, NCCL on GPUs and gloo on CPUs; no other group is touched.

    Raises RuntimeError if not all ranks have called it within `TIMEOUT`. Nothing breaks off the wait for them: NCCL can
    abort a communicator only once it is there, so it is made here, by a first sum, not where work is under way.
    """
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    # These two keep NCCL, when a rank has died, from ending the whole program by a thread of its own; whoever started
    # the ranks watches them.
    with environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        parallel = TensorParallel(rank, size, kind(store, rank, size, timeout=TIMEOUT), spread_images)
    met = parallel.sum(torch.ones(1, device=device)).item()
    assert met == size
    if device.type == "cpu" or int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size:        # launched on several hosts
        return parallel
    return replace(parallel, peers=_map_peers(store, parallel, device))


def _map_peers(store: Store, parallel: TensorParallel, device: torch.device) -> PeerMemory | None:
    """Memory for small sums; None, and then on all ranks, if one of them cannot map it."""
    peers = None
    try:
        peers = share_memory(store, parallel.rank, parallel.size, device)
    except Exception as error:          # whatever the driver or this version of torch does not offer
        logger.warning("GPUs do not map each other's memory, so all sums over ranks go through NCCL: %s", error)
    [all_have] = parallel.smallest([int(peers is not None)], device)
    return peers if all_have else None


def host_store() -> TCPStore:
    """A store where ranks on this machine find each other; the system chooses its port, so that none is taken."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def join_store(port: int) -> TCPStore:
    """The store that another process of this machine hosts."""
    return TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)


def launched_rank(size: int) -> int | None:
    """The rank of this process among `size` that a launcher such as torchrun has started; None if it is on its own.

    Raises ValueError if they are another number.
    """
    rank, world = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE", 1))
    if rank is None or world == 1:
        return None
    if world != size:
        raise ValueError(f"tensor_parallel_size={size}, but WORLD_SIZE={world} processes were launched: launch "
                         f"{size}, or give tensor_parallel_size={world}")
    return int(rank)


def launched_store(rank: int, size: int) -> Store:
    """What the launched processes share, each engine of theirs under keys of its own.

    The store of the default process group if there is one, else that of MASTER_ADDR and MASTER_PORT.
    """
    if dist.is_initialized():
        shared = dist.distributed_c10d._get_default_store()
    else:
        shared, _, _ = next(rendezvous("env://", rank, size, timeout=TIMEOUT))
    number = shared.add(f"nanovllm engines of rank {rank}", 1)      # ranks make their engines in the same order
    return PrefixStore(f"nanovllm engine {number}", shared)
