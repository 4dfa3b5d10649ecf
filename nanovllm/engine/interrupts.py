"""Holds Ctrl-C back while bookkeeping is half done."""
from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A SIGINT that arrives inside is handled at the end, by the handler that was there before.

    Python interrupts its main thread alone: on another thread, or without a handler in Python, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: arrived.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(signal.SIGINT, arrived[0])
