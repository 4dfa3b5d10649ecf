"""Ranks that a launcher such as torchrun has started: they meet over its store and talk over sockets of their own."""
from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener

import torch

from nanovllm.parallel import TensorParallel, connect, launched_store
from nanovllm.runner.channel import EndCall, Failed, Ready, pack, receive, send
from nanovllm.runner.plan_changes import PlanMemory
from nanovllm.runner.rank import StepRunner, describe, follow
from nanovllm.runner.workers import RankError, Ranks

KEY_BYTES = 32


class JoinedRanks(Ranks):
    """The other ranks as rank 0 sees them; they end by themselves, but fail together."""

    def __init__(self, rank: int, size: int, device: torch.device, spread_images: bool) -> None:
        assert rank == 0
        self.prepare(size, device)
        with self.starting():
            store, key = launched_store(rank, size), secrets.token_bytes(KEY_BYTES)
            with Listener(("", 0), authkey=key) as listener:
                store.set("port", str(listener.address[1]))
                store.set("key", key.hex())
                for _ in range(1, size):
                    connection = without_delay(listener.accept())
                    self.connections[receive(connection)] = connection
            self.watcher.start()
            self.connect(store, spread_images)

    def end_call(self) -> None:
        message = pack(EndCall())
        for connection in self.connections.values():
            with suppress(OSError):     # a rank that is gone was or will be noticed
                send(connection, message)


class FirstRank:
    """Rank 0 as the others see it."""

    def __init__(self, rank: int, size: int, device: torch.device, spread_images: bool) -> None:
        self.rank, self.device, self.memory = rank, device, PlanMemory()
        store = launched_store(rank, size)
        address = os.environ.get("MASTER_ADDR", socket.gethostname()), int(store.get("port"))
        self.connection = without_delay(Client(address, authkey=bytes.fromhex(store.get("key").decode())))
        send(self.connection, pack(rank))
        self.parallel: TensorParallel = connect(store, rank, size, device, spread_images)

    def say_ready(self) -> None:
        send(self.connection, pack(Ready()))

    def follow(self, runner: StepRunner) -> None:
        """Until the call is over that rank 0 makes, too; RuntimeError if rank 0 has closed the engine instead."""
        if not follow(self.connection, runner, self.memory):
            raise RuntimeError("rank 0 has closed the engine: every rank has to make the same calls")

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """An error in the block ends all ranks; RankError if it is that rank 0 is gone."""
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise RankError("rank 0 is gone") from error
        except BaseException as error:
            with suppress(OSError):
                send(self.connection, pack(Failed(describe(error))))
            self.close()
            raise

    def close(self) -> None:
        self.connection.close()
        self.parallel.abort()


def without_delay(connection: Connection) -> Connection:
    """The connection, told to send small messages, such as plans, at once."""
    with socket.socket(fileno=os.dup(connection.fileno())) as view:
        view.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
