"""The ranks behind the first: started, told what to do, watched, and ended with the engine."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from nanovllm.parallel import TensorParallel, connect, host_store
from nanovllm.plan import StepPlan
from nanovllm.runner.channel import Close, Ready, Start, pack, pack_plan, receive, send
from nanovllm.runner.plan_changes import PlanMemory

# In an interpreter of its own, which imports nothing of the embedding program: a script needs no main guard, and
# notebooks and programs from standard input work too. Ctrl-C is for the first rank to handle.
BOOTSTRAP = ("import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[3:]; "
             "from nanovllm.runner.rank import serve; serve(int(sys.argv[1]), int(sys.argv[2]))")
START_SECONDS = 120.0       # for a rank to import torch and say so
EXIT_SECONDS = 5.0          # for a rank to give its memory back and end
BLAME_SECONDS = 2.0         # between an error on rank 0 and the word of the rank that caused it


class RankError(RuntimeError):
    """A rank of an engine failed or was killed: the engine is closed, and a new one can be made at once."""


class Ranks:
    """Ranks 1 to size - 1 as rank 0 sees them, each a process on this machine.

    `Start.build(*args, parallel=..., device=...)` makes the runner of each. A thread watches: when a rank fails or
    ends, all are killed, and whatever rank 0 waits for is broken off.
    """

    def __init__(self, devices: Sequence[torch.device], spread_images: bool, build: Callable[..., Any],
                 args: tuple[Any, ...]) -> None:
        self.prepare(len(devices), devices[0])
        with self.starting():
            self._start(devices, spread_images, build, args)

    def prepare(self, size: int, device: torch.device) -> None:
        """The state before any rank is there."""
        self.size, self.device = size, device
        self.parallel = TensorParallel(0, self.size)        # until the ranks are connected
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.connections: dict[int, Connection] = {}
        self.memory = PlanMemory()
        self.failure: str | None = None
        self.num_ready = 0
        self.changed = threading.Condition()                # guards the two above
        self.aborting: threading.Thread | None = None
        self.stop, self.stopped = Pipe()
        self.watcher = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """For the start of the ranks: an error in it leaves nothing of them."""
        try:
            with self.together():
                yield
        except BaseException:
            self.close()
            raise

    def _start(self, devices: Sequence[torch.device], spread_images: bool, build: Callable[..., Any],
               args: tuple[Any, ...]) -> None:
        for rank in range(1, self.size):
            self.connections[rank], self.processes[rank] = start_process()
        self.watcher.start()
        store, threads = host_store(), max(1, torch.get_num_threads() // self.size)
        for rank, connection in self.connections.items():
            send(connection, pack(Start(build, args, rank, self.size, store.port, str(devices[rank]), spread_images,
                                        threads)))
        self.await_ready(START_SECONDS)
        self.connect(store, spread_images)

    def connect(self, store: Store, spread_images: bool) -> None:
        """Meets the other ranks; a thread waits for them, since nothing breaks off that wait if one dies."""
        met: list[TensorParallel | Exception] = []

        def meet() -> None:
            try:
                met.append(connect(store, 0, self.size, self.device, spread_images))
            except Exception as error:
                met.append(error)
            with self.changed:
                self.changed.notify_all()

        threading.Thread(target=meet, name="nanovllm-connect", daemon=True).start()
        with self.changed:
            self.changed.wait_for(lambda: met or self.failure)
        self._check()
        if isinstance(met[0], Exception):
            raise met[0]
        self.parallel = met[0]

    # ------------------------------------------------------------ work

    def tell(self, plan: StepPlan) -> None:
        """Sends every rank what it does not know yet of a plan."""
        messages = pack_plan(self.memory.changes(plan), self.size, self.parallel.spread_images)
        for connection, message in zip(self.connections.values(), messages):
            send(connection, message)

    def end_call(self) -> None:
        """Lets ranks go that follow no longer than a call; these do for as long as they live."""

    def await_ready(self, seconds: float | None = None) -> None:
        """Until every rank is where it next meets the others; raises RankError if one fails, or needs too long."""
        with self.changed:
            arrived = self.changed.wait_for(lambda: self.failure or self.num_ready == self.size - 1, seconds)
            num_ready, self.num_ready = self.num_ready, 0
        if not arrived:
            self._fail(f"only {num_ready} of {self.size - 1} ranks started within {seconds:.0f} s")
        self._check()

    @contextmanager
    def together(self) -> Iterator[None]:
        """For whatever the ranks do in step: an error in it leaves them out of step, so it ends all of them.

        Ctrl-C waits until it is over; a second one does not.
        """
        self._check()
        with later_interrupts():
            try:
                yield
                self._check()       # what NCCL broke off looks like an end
            except Exception as error:
                self._blame(error)
                if isinstance(error, (RankError, ValueError, FileNotFoundError)):
                    raise
                raise RankError(self._message()) from error
            except BaseException:
                self._fail("rank 0 was interrupted")
                raise

    def _check(self) -> None:
        if self.failure is not None:
            raise RankError(self._message())

    def _message(self) -> str:
        return f"{self.failure}\nthe engine is closed: make a new LLM"

    # ------------------------------------------------------------ death

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self.connections.items()}
        while True:
            for source in wait([*ranks, self.stopped]):
                if source is self.stopped:
                    return
                rank = ranks[source]        # type: ignore[index]
                try:
                    message = receive(source)       # type: ignore[arg-type]
                except (EOFError, OSError):
                    self._fail(f"rank {rank} {self._death(rank)}")
                    return
                if not isinstance(message, Ready):
                    self._fail(f"rank {rank} failed: {message.error}")
                    return
                with self.changed:
                    self.num_ready += 1
                    self.changed.notify_all()

    def _death(self, rank: int) -> str:
        try:
            code = self.processes[rank].wait(BLAME_SECONDS)
        except (KeyError, subprocess.TimeoutExpired):       # a launched rank is not our process
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _blame(self, error: Exception) -> None:
        """Finds out which rank is to blame for an error on this one: another, if that is known soon, else this."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None, BLAME_SECONDS)
        self._fail(f"rank 0 failed: {type(error).__name__}: {error}")

    def _fail(self, failure: str) -> None:
        """Keeps the first failure, kills every rank and breaks off what rank 0 waits for."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = failure
            self.changed.notify_all()
        for process in self.processes.values():
            process.kill()
        self._break_off()
        for process in self.processes.values():
            process.wait()
        self.parallel.release()

    def _break_off(self) -> None:
        """Ends what rank 0 waits for, by a thread: NCCL's own end waits until the CUDA graphs are gone."""
        self.aborting = threading.Thread(target=self.parallel.abort, name="nanovllm-abort", daemon=True)
        self.aborting.start()

    def close(self) -> None:
        """Ends every rank and returns when none is left; calling it again does nothing."""
        if self.watcher.is_alive():
            self.stop.send_bytes(b"")
            self.watcher.join(EXIT_SECONDS)
        for connection in self.connections.values():
            with suppress(OSError):
                send(connection, pack(Close()))
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_SECONDS)
            process.kill()
            process.wait()
        for connection in (*self.connections.values(), self.stop, self.stopped):
            connection.close()
        if self.aborting is None:
            self._break_off()
        if self.aborting is not None:
            self.aborting.join(EXIT_SECONDS)
        self.connections.clear()
        self.processes.clear()
        self.parallel = TensorParallel(0, self.size)


def start_process() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A new rank that waits for its `Start`, and this end of the socket to it."""
    ours, theirs = Pipe()
    with theirs:
        command = [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), *sys.path]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)


@contextmanager
def later_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back until the end of the block, unless it comes twice."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[tuple[Any, ...]] = []

    def note(*args: Any) -> None:
        if pressed:
            handler(*args)
        pressed.append(args)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        handler(*pressed[0])
