"""Finds the fastest tiles for products of 1 to 8 rows at the sizes of Qwen3-0.6B, beside cuBLAS and the floor.

    python tools/linear_sweep.py [--json FILE]

Each variant runs many times in one CUDA graph, over weights that rotate so that none of them stays in the L2 cache.
Kernels are compiled first, by as many processes as there are cores.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from kernel_case import BYTES_PER_SECOND, DEVICE, DTYPE, GPU, TOLERANCE
from torch import Tensor

from nanovllm.kernels import few_rows
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.few_rows import Tiles
from nanovllm.kernels.norm import add_rms_norm

ROTATED = 160 << 20         # bytes of weights
CALLS = 96                  # of one graph
FORMS = {"qkv": ("linear", 4096, 1024), "o": ("linear", 1024, 2048), "gate_up": ("linear", 6144, 1024),
         "down": ("linear", 1024, 3072), "norm + qkv": ("norm", 4096, 1024), "norm + gate_up": ("norm", 6144, 1024),
         "gate + down": ("gate", 1024, 3072), "head": ("linear", 151936, 1024)}
SMALL = {"qkv": ("linear", 64, 32), "norm + qkv": ("norm", 64, 32), "gate + down": ("gate", 32, 64)}
SHAPES = FORMS if GPU else SMALL
ROWS = (1, 2, 4, 8) if GPU else (1, 2)


@dataclass(frozen=True)
class Variant:
    """One way to cut up a product."""

    name: str               # of the shape
    rows: int
    tiles: tuple[int, int, int]     # cols, depth, warps
    early: bool = False


@dataclass
class Inputs:
    """Rows, and as many weights as rotate."""

    x: Tensor
    other: Tensor
    gain: Tensor
    weights: list[Tensor]


def make_inputs(name: str, rows: int, rotated: int) -> Inputs:
    _, out_features, in_features = SHAPES[name]
    torch.manual_seed(0)
    both = torch.randn(2, rows, in_features, device=DEVICE, dtype=DTYPE)
    sets = max(1, rotated // (out_features * in_features * 2)) if GPU else 1
    weights = [torch.randn(out_features, in_features, device=DEVICE, dtype=DTYPE).div_(in_features**0.5)
               for _ in range(sets)]
    return Inputs(both[0], both[1], torch.randn(in_features, device=DEVICE, dtype=DTYPE), weights)


def expected(name: str, given: Inputs) -> Tensor:
    x, other = given.x.float(), given.other.float()
    form = SHAPES[name][0]
    if form == "gate":
        x = F.silu(x) * other
    elif form == "norm":
        x = F.rms_norm(x + other, (x.shape[1],), given.gain.float(), 1e-6)
    return F.linear(x, given.weights[0].float())


def run_variant(variant: Variant, given: Inputs, i: int) -> Tensor:
    form, x, weight = SHAPES[variant.name][0], given.x, given.weights[i % len(given.weights)]
    how: Any = dict(tiles=Tiles(*variant.tiles, variant.early))
    if form == "gate":
        return few_rows.gated_linear(x, given.other, weight, None, **how)
    if form == "norm":
        return few_rows.norm_linear(x, given.other, given.gain, 1e-6, weight, None, **how)[0]
    return few_rows.linear(x, weight, None, **how)


def run_library(name: str, given: Inputs, i: int) -> Tensor:
    """The same with cuBLAS, behind our kernel of the norm or the gate."""
    form, x = SHAPES[name][0], given.x
    if form == "gate":
        x = silu_and_mul(x, given.other)
    elif form == "norm":
        x = add_rms_norm(x, given.other, given.gain, 1e-6)[0]
    return F.linear(x, given.weights[i % len(given.weights)])


def variants_of(name: str, rows: int) -> list[Variant]:
    in_features = SHAPES[name][2]
    if not GPU:
        return [Variant(name, rows, (4, 32, 1))]
    places = [(256, 1), (512, 2), (1024, 2), (1024, 4), (2048, 8)]
    tiles = [(cols, depth, warps) for cols, (depth, warps) in product((1, 2, 4, 8), places)
             if depth <= in_features and (cols > 1 or in_features > 1024)
             and cols * depth * rows <= 256 * 32 * warps]
    if name == "head":
        tiles = [each for each in tiles if each[0] > 2 and each[1] > 256]
    return [Variant(name, rows, each, early) for each in tiles for early in (False, True)]


def compile_one(variant: Variant) -> str | None:
    """Runs it once, in a process of its own; the message if that fails."""
    try:
        with torch.inference_mode():
            given = make_inputs(variant.name, variant.rows, 1)
            out, wanted = run_variant(variant, given, 0).float(), expected(variant.name, given)
            error = ((out - wanted).norm() / wanted.norm()).item()
        return None if error < TOLERANCE else f"error {error:.1e}"
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:100]}"


def time_us(run: Callable[[int], Tensor], calls: int) -> float:
    """Microseconds of one call."""
    run(0)
    if not GPU:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i)
    rounds = []
    for _ in range(6):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(1e3 * start.elapsed_time(stop) / calls)
    return statistics.median(rounds[1:])


def kind_of(variant: Variant) -> str:
    return "early" if variant.early else "plain"


def measure(name: str, rows: int, variants: list[Variant], rows_out: list[dict[str, Any]]) -> None:
    """One line of the table: the best of each kind, the library and the floor."""
    given = make_inputs(name, rows, ROTATED)
    calls = CALLS if len(given.weights) > 1 else 8
    library = time_us(lambda i: run_library(name, given, i), calls)
    floor = given.weights[0].numel() * 2 / BYTES_PER_SECOND * 1e6
    best: dict[str, tuple[float, tuple[int, ...]]] = {}
    for variant in variants:
        us = time_us(lambda i, variant=variant: run_variant(variant, given, i), calls)
        rows_out.append(asdict(variant) | dict(us=us, kind=kind_of(variant)))
        best[kind_of(variant)] = min(best.get(kind_of(variant), (us, variant.tiles)), (us, variant.tiles))
    rows_out.append(dict(name=name, rows=rows, kind="library", us=library, floor=floor))
    cells = [f"{kind} {best[kind][0]:6.2f} {best[kind][1]!s:18}"
             for kind in ("plain", "early") if kind in best]
    print(f"{name:15} {rows:3} | cuBLAS {library:6.2f} | floor {floor:6.2f} | {' | '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for one JSON line a variant")
    options = parser.parse_args()
    begin = time.perf_counter()
    wanted = [variant for name in SHAPES for rows in ROWS for variant in variants_of(name, rows)]
    if GPU:
        with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, 14)) as pool:
            failures = pool.map(compile_one, wanted, chunksize=8)
    else:
        failures = [compile_one(variant) for variant in wanted]
    print(f"{len(wanted)} variants compiled and checked in {time.perf_counter() - begin:.0f} s; us of one call",
          flush=True)
    for failed in [(variant, why) for variant, why in zip(wanted, failures) if why is not None][:10]:
        print("FAILED", *failed)
    good = [variant for variant, why in zip(wanted, failures) if why is None]
    rows_out: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, rows in product(SHAPES, ROWS):
            measure(name, rows, [v for v in good if (v.name, v.rows) == (name, rows)], rows_out)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows_out)


if __name__ == "__main__":
    main()
