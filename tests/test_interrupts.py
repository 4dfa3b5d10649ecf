"""Ctrl-C at any line of the engine leaves it usable, with nothing held by a request."""
from __future__ import annotations

import random
import signal
import sys
import threading

import pytest

from nanovllm.engine.interrupts import uninterrupted
from tests.checkpoints import make_qwen2_5_vl
from tests.engines import assert_idle, assert_right, generate, greedy, make_llm, run
from tests.oracle import Oracle
from tests.prompts import picture, prompt, text

PICTURE, WIDE = picture(56, 56, 1), picture(56, 140, 2)
PROMPTS = [prompt(text(20), PICTURE, text(5)), prompt(text(9), PICTURE, text(3), WIDE, text(2)), prompt(text(30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_qwen2_5_vl(tmp_path_factory.mktemp("vl"))


class CtrlC:
    """Counts the lines of the package that run, and sends SIGINT at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.num_lines = at, 0

    def _trace(self, frame, event, arg):
        if "nanovllm" not in frame.f_globals.get("__name__", ""):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


@pytest.mark.parametrize("overlap", [False, True])
def test_interrupt_at_any_line(folder, overlap):
    """Images to reuse, chunks and preemption, interrupted again and again; what comes next is right."""
    oracle, rng = Oracle(folder), random.Random(0)
    with make_llm(folder, block_size=16, overlap=overlap, num_kvcache_blocks=7, max_model_len=100,
                  max_num_batched_tokens=40, recompute_ratio=0.3) as llm:
        with CtrlC() as counted:
            generate(llm, *PROMPTS, max_tokens=24)
        assert llm.stats()["preemptions"] > 0
        for _ in range(60):
            if rng.random() < 0.3:
                llm.reset_caches()
            try:
                with CtrlC(rng.randrange(counted.num_lines)):
                    generate(llm, *PROMPTS, max_tokens=24)
            except KeyboardInterrupt:
                pass
            assert_idle(llm)
        for words, output in zip(PROMPTS, run(llm, PROMPTS, greedy(3, logprobs=-1, recompute_ratio=0.0))):
            assert_right(oracle, words, output)


def test_interrupt_is_held_back_and_not_lost():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("behind")
    assert done == ["inner", "outer"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_that_python_never_interrupts_change_no_handler():
    seen = []

    def look():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
