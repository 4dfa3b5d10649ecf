"""A rank behind the first, as the process of its own that `workers` starts: it does what rank 0 tells it, then ends."""
from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from time import sleep
from typing import Any, Protocol

import torch

from nanovllm.parallel import connect, join_store
from nanovllm.runner.channel import Close, EndCall, Failed, Ready, Start, pack, receive, send
from nanovllm.runner.plan_changes import PlanMemory

PARENT_POLL_SECONDS = 0.5


class StepRunner(Protocol):
    """What carries out steps on one rank."""

    def launch(self, plan: Any, /) -> Any: ...
    def collect(self, step: Any, /) -> Any: ...
    def close(self) -> None: ...


def serve(fd: int, parent: int) -> None:
    """The life of a rank that process `parent` started and talks to through socket `fd`; does not return."""
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    connection, code = Connection(fd), 1
    try:
        runner = start_runner(receive(connection), connection)
        send(connection, pack(Ready()))
        follow(connection, runner, PlanMemory())
        runner.close()
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass            # rank 0 is gone, and with it whoever could be told
    except BaseException as error:
        with suppress(OSError):
            send(connection, pack(Failed(describe(error))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)      # at once: nothing that other threads or a stuck GPU hold may keep the process


def end_with(parent: int) -> None:
    """Ends this process when `parent` has ended, however that came; other processes may hold copies of the socket."""
    while os.getppid() == parent:
        sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def start_runner(start: Start, connection: Connection) -> StepRunner:
    """Meets the other ranks and builds this one's runner."""
    torch.set_num_threads(start.num_threads)
    device = torch.device(start.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = join_store(start.port)
    send(connection, pack(Ready()))
    parallel = connect(store, start.rank, start.size, device, start.spread_images)
    runner: StepRunner = start.build(*start.args, parallel=parallel, device=device)
    return runner


def follow(connection: Connection, runner: StepRunner, memory: PlanMemory) -> bool:
    """Carries out plans until it is told to close, or, which makes it return True, that a call is over.

    As on rank 0, a step may be launched while one is still running. memory: of all that rank 0 ever told this rank.
    """
    launched: deque[Any] = deque()
    while not isinstance(message := receive(connection), (Close, EndCall)):
        launched.append(runner.launch(memory.restore(message)))
        if len(launched) > 1:
            runner.collect(launched.popleft())
    for step in launched:
        runner.collect(step)
    return isinstance(message, EndCall)


def describe(error: BaseException) -> str:
    """The error in one line, and where it came from in the lines behind."""
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}"
