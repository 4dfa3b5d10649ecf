"""Says where the time of one decode step, or of one call with a picture that comes back, goes: host and device.

    python tools/profile_step.py decode --size 0.6b --num-seqs 256
    python tools/profile_step.py image --size 3b --ratio 0.02
"""
from __future__ import annotations

import argparse
import cProfile
import io
import pstats
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.image import MOVED_BY, TEXT_BEFORE, ImageWork
from benchmarks.models import open_model
from nanovllm import LLM, SamplingParams

REPEATS = 20


def report(name: str, run: Callable[[], None], repeats: int = REPEATS) -> None:
    """Wall time of `run`, time of each kind of kernel in it, and the host functions that take longest."""
    run()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:70]].append(event.device_time / 1e3)
    total = sum(map(sum, kernels.values())) / 3
    print(f"\n{name}: {1e3 * median(times):.3f} ms wall, {total:.3f} ms of kernels")
    for kernel, spans in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"  {sum(spans) / 3:8.3f} ms  {len(spans) / 3:6.1f} x {1e3 * median(spans):7.1f} us  {kernel}")
    host = cProfile.Profile()
    host.enable()
    for _ in range(5):
        run()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(14)
    print("\n".join(line for line in text.getvalue().splitlines()[4:] if line.strip()))


def profile_decode(llm: LLM, num_seqs: int) -> None:
    for i in range(num_seqs):
        llm.add_request([1 + i % 1000] * 600, SamplingParams(0.6, 400, ignore_eos=True))
    while llm.scheduler.waiting or any(seq.num_completion_tokens < 2 for seq in llm.scheduler.running):
        llm.step()

    def steps() -> None:
        for _ in range(4):
            llm.step()

    report(f"4 decode steps of {num_seqs}", steps)


def profile_image(llm: LLM, ratio: float) -> None:
    work = ImageWork(llm.config.model_config, llm.tokenizer.vocab_size, 3840, 2160, named=False)
    params = SamplingParams(max_tokens=1, ignore_eos=True, recompute_ratio=ratio)
    count = iter(range(1, 10**6))
    llm.generate(work.prompt(1, 2), params, work.mm_inputs, use_tqdm=False)

    def moved() -> None:
        llm.generate(work.prompt(next(count) + 100, 4, TEXT_BEFORE + MOVED_BY), params, work.mm_inputs, use_tqdm=False)

    def same() -> None:
        llm.generate(work.prompt(1, next(count) + 100), params, work.mm_inputs, use_tqdm=False)

    def cold() -> None:
        llm.reset_caches()
        llm.generate(work.prompt(1, 2), params, work.mm_inputs, use_tqdm=False)

    report(f"moved, ratio {ratio}", moved, 5)
    report(f"same prefix, ratio {ratio}", same, 5)
    report("cold", cold, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "image"))
    parser.add_argument("--model")
    parser.add_argument("--size")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--ratio", type=float, default=0.02)
    args = parser.parse_args()
    with open_model(args.model, args.size) as folder:
        start = perf_counter()
        llm = LLM(folder.path, **folder.options)
        print(f"ready after {perf_counter() - start:.1f} s")
        if args.what == "decode":
            profile_decode(llm, args.num_seqs)
        else:
            profile_image(llm, args.ratio)
        llm.exit()


if __name__ == "__main__":
    main()
