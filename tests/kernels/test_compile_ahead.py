"""Kernels that some work needs are compiled together, and once; nothing of the work is launched before."""
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.interpreted import run_python

HOPPER = ("cuda", 90, 32)


def test_new_kernels_are_left_out_then_compiled_once() -> None:
    pytest.importorskip("triton")
    run_python("from tests.kernels.test_compile_ahead import compile_for_hopper; compile_for_hopper()",
               TRITON_INTERPRET="0", TRITON_ALWAYS_COMPILE="1")


class Launches:
    """Stands in for the driver of a Hopper GPU: kernels are compiled for it, and launches are counted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*HOPPER)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: SimpleNamespace) -> object:
        return lambda *_: self.names.append(metadata.name)

    @property
    def utils(self) -> SimpleNamespace:
        return SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 1 << 18},
                               load_binary=lambda *_: (0, 0, 0, 0, 1024))


def compile_for_hopper() -> None:
    import triton
    from triton import knobs

    from nanovllm.kernels import activation, compile_ahead, norm

    launches, compiled = Launches(), []
    triton.runtime.driver.set_active(launches)
    knobs.runtime.jit_post_compile_hook = lambda **launch: compiled.append(launch["fn"].name)
    x, gain = torch.randn(4, 64), torch.randn(64)

    def work() -> None:
        norm.rms_norm(x, gain, 1e-6)
        norm.rms_norm(x, gain, 1e-6)
        activation.silu_and_mul(x, x)
        assert not launches.names, "a kernel of the work was launched"
        elsewhere = threading.Thread(target=activation.silu_and_mul, args=(x.double(), x.double()))
        elsewhere.start()
        elsewhere.join()
        assert launches.names == ["_silu_and_mul_kernel"], "what another thread launches is left out"

    assert compile_ahead.compile_ahead(work) == 2
    assert sorted(compiled) == ["_rms_norm_kernel", "_silu_and_mul_kernel", "_silu_and_mul_kernel"]
    launches.names.clear()
    assert compile_ahead.compile_ahead(lambda: activation.silu_and_mul(x, x)) == 0
    norm.rms_norm(x, gain, 1e-6)
    assert launches.names == ["_silu_and_mul_kernel", "_rms_norm_kernel"] and len(compiled) == 3, "compiled again"

    with pytest.raises(ZeroDivisionError):
        compile_ahead.compile_ahead(lambda: 1 // 0)
    norm.rms_norm(x.double(), gain.double(), 1e-6)
    assert len(compiled) == 4 and len(launches.names) == 3, "launches are still left out after an error"
    check_two_at_once(launches)
    check_a_failure(launches)


def check_two_at_once(launches: Launches) -> None:
    """The hook of the first to end is put back by the second, and leaves out nothing from then on."""
    from nanovllm.kernels import activation, compile_ahead

    x, begun, over = torch.randn(4, 65), threading.Event(), threading.Event()

    def second() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=compile_ahead.compile_ahead, args=(second,))

    def first() -> None:
        thread.start()
        begun.wait()

    compile_ahead.compile_ahead(first)
    over.set()
    thread.join()
    launches.names.clear()
    activation.silu_and_mul(x, x)
    assert launches.names == ["_silu_and_mul_kernel"]


def check_a_failure(launches: Launches) -> None:
    """Triton compiles as ever after an error of its compiler."""
    from nanovllm.kernels import activation, compile_ahead, norm

    x = torch.randn(4, 66)
    kernel, compiler = norm._rms_norm_kernel, norm._rms_norm_kernel.compile

    def work() -> None:
        norm.rms_norm(x, x[0], 1e-6)
        kernel.compile = fail

    def fail(*args: object, **options: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        compile_ahead.compile_ahead(work)
    kernel.compile = compiler
    launches.names.clear()
    activation.silu_and_mul(x, x)
    assert launches.names == ["_silu_and_mul_kernel"]
    assert compile_ahead.compile_ahead(lambda: activation.silu_and_mul(x.double(), x.double())) == 1
