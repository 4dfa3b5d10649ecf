"""Compiles the kernels that some work needs side by side, in place of one after the other as it comes to them."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import triton
from triton import knobs


def compile_ahead(work: Callable[[], object]) -> int:
    """Runs `work`, then compiles the kernels that it launched and that this process had not compiled; returns how many.

    Such launches are left out, so what `work` computes is worth nothing, and it must not take an index from it. What
    other threads launch meanwhile is compiled and runs as ever. Raises what compiling or `work` raises.
    """
    caller, outer = get_ident(), knobs.runtime.jit_cache_hook
    found: dict[tuple[triton.JITFunction[Any], str], str] = {}

    def leave_out(**launch: Any) -> bool:
        if get_ident() == caller:
            found[launch["fn"].jit_function, launch["key"]] = launch["compile"]["specialization_data"]
            return True
        return bool(outer and outer(**launch))

    knobs.runtime.jit_cache_hook = leave_out
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = outer
    with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
        for (kernel, _), launch in found.items():
            kernel.preload(launch)
    return len(found)
