"""Compiles the kernels that some work needs side by side, in place of one after the other as it comes to them."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import get_ident
from typing import Any

import triton
from triton import knobs


def compile_ahead(work: Callable[[], object]) -> int:
    """Runs `work`, then compiles the kernels that it launched and that this process had not compiled; returns how many.

    Such launches are left out, so what `work` computes is worth nothing, and it must not take an index from it. What
    other threads launch meanwhile is compiled and runs as ever. Raises what compiling or `work` raises.
    """
    caller, outer, working = get_ident(), knobs.runtime.jit_cache_hook, True
    found: dict[tuple[triton.JITFunction[Any], str], str] = {}

    def leave_out(**launch: Any) -> bool:
        # Two threads that do this at once may put each other's hook back: what is over leaves out nothing.
        if working and get_ident() == caller:
            found[launch["fn"].jit_function, launch["key"]] = launch["compile"]["specialization_data"]
            return True
        return bool(outer and outer(**launch))

    def compile_found() -> None:
        with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
            for (kernel, _), launch in found.items():
                kernel.preload(launch)

    knobs.runtime.jit_cache_hook = leave_out
    try:
        work()
    finally:
        working = False
        knobs.runtime.jit_cache_hook = outer
    copy_context().run(compile_found)       # Triton 3.6 does not leave its mode after an error
    return len(found)
