"""Checks every kernel and attention backend against its torch twin in float32, and times it beside its floor.

    python tools/bench_kernels.py [--sweep] [--only WORD] [--json FILE]

On a CUDA device at the sizes of the published models, from CUDA graphs whose calls rotate among inputs larger than the
L2 cache; on the CPU (TRITON_INTERPRET=1) at tiny sizes, to check the script itself. `--sweep` also tries tile sizes.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.flash import FlashAttention2, FlashAttention3
from nanovllm.attention.torch_backend import TorchBackend, store_kv_torch
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels import activation, kv_move, norm, rotary, sampling
from nanovllm.kernels import attention as kernel
from nanovllm.kernels.attention import Tiles
from nanovllm.kernels.kv_store import store_kv
from nanovllm.layers import sampler
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.25e12, 700e12        # an H200: copy, and a large bf16 product
GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float16)
ROTATED_BYTES = 512 << 20
TOLERANCE = 1e-2            # |out - twin| / |twin|
Run = Callable[[int], Any]  # the work on input set i


@dataclass
class Case:
    """One piece of work: its floor, who can do it, and the float32 result."""

    name: str
    bytes: float                        # read once and written once, of one call
    flops: float
    sets: int                           # of inputs
    runs: dict[str, Run]                # returns the result, or the tensor that it changed
    expected: Callable[[], Tensor] | None      # for input set 0
    sweep: dict[str, Run] = field(default_factory=dict)
    eager: tuple[str, ...] = ("torch",)       # those a CUDA graph cannot hold

    @property
    def floor_ms(self) -> float:
        return max(self.bytes / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND) * 1e3


# ---------------------------------------------------------------- measuring

def time_ms(run: Run, sets: int, eager: bool) -> float:
    """Milliseconds of one call: the median of several rounds."""
    for i in range(min(sets, 3)):
        run(i)
    if GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run(0)
    if not GPU:
        return (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    slow = time.perf_counter() - begin > 5e-3
    calls, num_rounds = (2, 4) if slow else (max(sets, 8), 11)

    def all_calls() -> None:
        for i in range(calls):
            run(i % sets)

    if not eager:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            all_calls()
        all_calls = graph.replay
    rounds = []
    for _ in range(num_rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        all_calls()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(stop) / calls)
    return statistics.median(rounds[1:])


def error_of(out: Tensor, expected: Tensor | None) -> float:
    if expected is None:
        return 0.0
    out, expected = out.double(), expected.double()
    return ((out - expected).norm() / expected.norm()).item()


def measure(case: Case, sweep: bool) -> Iterator[dict[str, Any]]:
    """One row for each implementation (and tile size) of a case."""
    expected = case.expected() if case.expected is not None else None
    for name, run in {**case.runs, **(case.sweep if sweep else {})}.items():
        row: dict[str, Any] = dict(case=case.name, by=name, floor_ms=case.floor_ms)
        try:
            error = error_of(run(0), expected)
            ms = time_ms(run, case.sets, name in case.eager)
            row |= dict(ms=ms, error=error, ratio=ms / case.floor_ms, ok=error < TOLERANCE,
                        tb_s=case.bytes / ms / 1e9, tflop_s=case.flops / ms / 1e9)
        except Exception as failure:
            row |= dict(ms=float("nan"), ok=False, failure=f"{type(failure).__name__}: {str(failure)[:150]}")
        yield row


def show(row: dict[str, Any]) -> None:
    if "failure" in row:
        print(f"{row['case']:34} {row['by']:26} FAILED {row['failure']}", flush=True)
        return
    print(f"{row['case']:34} {row['by']:26} {row['ms']:9.4f} ms  floor {row['floor_ms']:8.4f}  x{row['ratio']:6.2f}  "
          f"{row['tb_s']:5.2f} TB/s {row['tflop_s']:6.0f} TFLOP/s  error {row['error']:.1e} "
          f"{'' if row['ok'] else 'WRONG'}", flush=True)


# ---------------------------------------------------------------- attention

def backends() -> dict[str, AttentionBackend]:
    found: dict[str, AttentionBackend] = {"triton": TritonBackend(torch.device(DEVICE))}
    for name, make in (("fa3", FlashAttention3), ("fa2", FlashAttention2)):
        with suppress(ImportError, OSError):
            found[name] = make()
    return found


def spans_of(lengths: Sequence[tuple[int, int]], tables: Tensor, block_size: int) -> SpanBatch:
    """Spans of (queries, keys)."""
    q_lens, k_lens = tuple(q for q, _ in lengths), tuple(k for _, k in lengths)
    cu_seqlens = torch.tensor([sum(q_lens[:i]) for i in range(len(q_lens) + 1)], dtype=torch.int32, device=DEVICE)
    return SpanBatch(cu_seqlens, torch.tensor(k_lens, dtype=torch.int32, device=DEVICE), tables,
                     torch.empty(0, dtype=torch.int64, device=DEVICE), q_lens, k_lens, max(q_lens), max(k_lens))


def paged_case(name: str, lengths: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int,
               grid: Sequence[Tiles] = (), one_sequence: bool = False, block_size: int = 256) -> Case:
    """Spans of (queries, keys), each of a sequence of its own unless they are all of one."""
    width = -(-max(k for _, k in lengths) // block_size)
    num_blocks = width * (1 if one_sequence else len(lengths))
    kv_bytes = num_blocks * block_size * kv_heads * dim * 2 * DTYPE.itemsize
    sets = max(1, min(32, ROTATED_BYTES // kv_bytes)) if GPU else 1
    caches = torch.randn(sets, 2, num_blocks, block_size, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    tables = torch.randperm(num_blocks, device=DEVICE).to(torch.int32).view(-1, width).expand(len(lengths), width)
    spans, scale = spans_of(lengths, tables.contiguous(), block_size), dim**-0.5
    q = torch.randn(sum(spans.q_lens), heads, dim, device=DEVICE, dtype=DTYPE)
    pairs = sum(m * (n - m) + m * (m + 1) / 2 for m, n in lengths)
    keys_read = max(spans.k_lens) if one_sequence else sum(spans.k_lens)

    def by(tiles: Tiles) -> Run:
        def run(i: int) -> Tensor:
            out = torch.empty_like(q)
            kernel.attend(q, caches[i, 0], caches[i, 1], out, spans.cu_seqlens_q, scale, tiles, spans.seqlens_k,
                          spans.block_tables, one_query=spans.max_seqlen_q == 1)
            return out
        return run

    def expected() -> Tensor:
        k_cache, v_cache = caches[0].float()
        return TorchBackend().attend(q.float(), k_cache, v_cache, spans, scale)

    return Case(
        name, keys_read * kv_heads * dim * 2 * DTYPE.itemsize + 2 * q.numel() * DTYPE.itemsize, 4 * pairs * heads * dim,
        sets, {key: partial(lambda backend, i: backend.attend(q, caches[i, 0], caches[i, 1], spans, scale), backend)
               for key, backend in backends().items()},
        expected, {str(tuple(vars(tiles).values())): by(tiles) for tiles in grid})


def segment_case(name: str, seqlens: Sequence[int], heads: int, dim: int, grid: Sequence[Tiles], check: bool) -> Case:
    tokens, scale, lengths = sum(seqlens), dim**-0.5, tuple(seqlens)
    qkv = torch.randn(tokens, 3, heads, dim, device=DEVICE, dtype=DTYPE)
    q, k, v = qkv.unbind(1)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)

    def by(tiles: Tiles) -> Run:
        def run(_: int) -> Tensor:
            out = torch.empty(q.shape, device=DEVICE, dtype=DTYPE)
            kernel.attend(q, k, v, out, cu_seqlens, scale, tiles)
            return out
        return run

    def expected() -> Tensor:
        return TorchBackend().encode(q.float(), k.float(), v.float(), cu_seqlens, lengths, scale)

    return Case(name, 4 * q.numel() * DTYPE.itemsize, 4 * sum(n * n for n in lengths) * heads * dim, 1,
                {key: partial(lambda backend, _: backend.encode(q, k, v, cu_seqlens, lengths, scale), backend)
                 for key, backend in backends().items()},
                expected if check else None, {str(tuple(vars(tiles).values())): by(tiles) for tiles in grid})


DECODE_SHAPES = [(64, 4, 3), (64, 4, 4), (32, 4, 4), (128, 8, 2), (32, 2, 4), (32, 4, 6), (64, 2, 3), (64, 4, 2),
                 (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3)]     # keys, warps, stages


def decode_grid(splits: Sequence[int], shapes: int = 4) -> list[Tiles]:
    return [Tiles(16, keys, warps, stages, n) for (keys, warps, stages), n in product(DECODE_SHAPES[:shapes], splits)]



PREFILL_GRID = [Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(128, 64, 4, 3),
                Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 2),
                Tiles(128, 128, 8, 3), Tiles(128, 32, 4, 4), Tiles(256, 64, 8, 3)]


def attention_cases() -> Iterator[Case]:
    if not GPU:
        yield paged_case("decode", [(1, 40), (1, 17)], 4, 2, 64, decode_grid([2])[:1], block_size=64)
        yield paged_case("prefill", [(20, 40)], 4, 2, 80, PREFILL_GRID[:1], block_size=64)
        yield segment_case("vision", [20, 9], 2, 80, PREFILL_GRID[:1], True)
        return
    yield paged_case("decode 256 x 1024, 16/8", [(1, 1024)] * 256, 16, 8, 128, decode_grid([1, 2], 12))
    lengths = torch.randint(100, 2048, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    yield paged_case("decode 256 x 100..2047, 16/8", [(1, n) for n in lengths], 16, 8, 128, decode_grid([1, 2, 4]))
    yield paged_case("decode 32 x 1024, 16/8", [(1, 1024)] * 32, 16, 8, 128, decode_grid([1, 2, 4]))
    yield paged_case("decode 8 x 1024, 16/8", [(1, 1024)] * 8, 16, 8, 128, decode_grid([4, 8, 16]))
    yield paged_case("decode 1 x 1024, 16/8", [(1, 1024)], 16, 8, 128, decode_grid([4, 8, 16]))
    yield paged_case("decode 1 x 10589, 16/2", [(1, 10589)], 16, 2, 128, decode_grid([16, 32, 64]))
    yield paged_case("decode 64 x 1024, 28/4", [(1, 1024)] * 64, 28, 4, 128)
    yield paged_case("prefill 10240, 16/2", [(10240, 10240)], 16, 2, 128, PREFILL_GRID)
    yield paged_case("prefill 16 x 1024, 16/8", [(1024, 1024)] * 16, 16, 8, 128, PREFILL_GRID)
    short = [replace(tiles, splits=n) for tiles in PREFILL_GRID[:8] for n in (4, 8, 16)]
    yield paged_case("warm image 225 + 27 of 10589", [(225, 235), (27, 10589)], 16, 2, 128, short, one_sequence=True)
    yield paged_case("warm image 1070 + 25 of 10589", [(1070, 1080), (25, 10589)], 16, 2, 128, short, one_sequence=True)
    yield paged_case("128 decodes and a prefill of 2048", [(1, 1024)] * 128 + [(2048, 2048)], 16, 8, 128)
    yield segment_case("vision full 8192, 16 x 80", [8192], 16, 80, [], True)
    yield segment_case("vision full 42196, 16 x 80", [42196], 16, 80, PREFILL_GRID, False)
    yield segment_case("vision windows of 64", [64] * 659 + [20], 16, 80,
                       [*PREFILL_GRID[:4], Tiles(64, 32, 4, 2)], True)


# ---------------------------------------------------------------- the rest

def norm_case(rows: int, size: int) -> Case:
    layer = RMSNorm(size, 1e-6).to(DEVICE, DTYPE)
    layer.weight.copy_(torch.randn(size))
    sets = max(1, min(64, ROTATED_BYTES // (8 * rows * size))) if GPU else 1
    x, residual = torch.randn(2, sets, rows, size, device=DEVICE, dtype=DTYPE)
    wide = RMSNorm(size, 1e-6).to(DEVICE, torch.float32)
    wide.weight.copy_(layer.weight)
    return Case(f"add + norm {rows} x {size}", 4 * rows * size * DTYPE.itemsize, 0, sets, {
        "triton": lambda i: norm.add_rms_norm(x[i], residual[i], layer.weight, 1e-6)[0],
        "torch": lambda i: layer.add_and_norm(x[i], residual[i])[0],
    }, lambda: wide(x[0].float() + residual[0].float()), eager=())


def gate_case(rows: int, size: int) -> Case:
    sets = max(1, min(64, ROTATED_BYTES // (6 * rows * size))) if GPU else 1
    both = torch.randn(sets, rows, 2 * size, device=DEVICE, dtype=DTYPE)
    return Case(f"silu and multiply {rows} x {size}", 3 * rows * size * DTYPE.itemsize, 0, sets, {
        "triton": lambda i: activation.silu_and_mul(*both[i].chunk(2, dim=1)),
        "torch": lambda i: silu_and_mul(*both[i].chunk(2, dim=1)),
    }, lambda: silu_and_mul(*both[0].float().chunk(2, dim=1)), eager=())


def with_constant(module: Any, name: str, value: int, run: Run) -> Run:
    """`run` while a module's constant has another value."""
    def changed(i: int) -> Any:
        before = getattr(module, name)
        setattr(module, name, value)
        try:
            return run(i)
        finally:
            setattr(module, name, before)
    return changed


def rotate_case(tokens: int, heads: int, dim: int) -> Case:
    qkv = torch.randn(tokens, 3 * heads, dim, device=DEVICE, dtype=DTYPE)
    x = qkv[:, : 2 * heads]
    angles = torch.randn(tokens, dim // 2, device=DEVICE)
    cos, sin, given = angles.cos(), angles.sin(), x.clone()

    def check(_: int) -> Tensor:
        x.copy_(given)
        rotary.rotate(x, cos, sin)
        return x.clone()

    def run(i: int) -> Tensor:
        rotary.rotate(x, cos, sin)
        return x

    def once_checked() -> Run:
        """The first call's result is checked; later ones turn what is there further."""
        first = iter((check,))
        return lambda i: next(first, run)(i)

    return Case(f"rotate {tokens} x {2 * heads} x {dim}", 2 * given.numel() * DTYPE.itemsize, 0, 1, {
        "triton": once_checked(), "torch": lambda i: apply_rotary(given, (cos, sin)),
    }, lambda: apply_rotary(given.float(), (cos, sin)),
        {f"rows {n}": with_constant(rotary, "ROWS", n, once_checked()) for n in (8, 32, 64)}, eager=())


def project_case(tokens: int, heads: int, kv_heads: int, dim: int, with_norm: bool) -> Case:
    blocks = -(-tokens // 256)
    caches = torch.zeros(2, blocks, 256, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    sets = max(1, min(64, ROTATED_BYTES // (4 * tokens * (heads + 2 * kv_heads) * dim))) if GPU else 1
    qkv = torch.randn(sets, tokens, heads + 2 * kv_heads, dim, device=DEVICE, dtype=DTYPE)
    slots = torch.randperm(blocks * 256, device=DEVICE)[:tokens]
    angles = torch.randn(tokens, dim // 2, device=DEVICE)
    rotation = angles.cos(), angles.sin()
    layer = RMSNorm(dim, 1e-6).to(DEVICE, DTYPE)
    layer.weight.copy_(torch.randn(dim))
    norms = (layer.weight, layer.weight, 1e-6) if with_norm else None

    def fused(i: int) -> Tensor:
        q = rotary.norm_rotate_store(qkv[i], *rotation, norms, caches[0], caches[1], slots)
        return q

    def twin(x: Tensor) -> Tensor:
        q, k, v = x.split((heads, kv_heads, kv_heads), dim=1)
        wide = RMSNorm(dim, 1e-6).to(DEVICE, x.dtype)
        wide.weight.copy_(layer.weight)
        q, k = (wide(q), wide(k)) if with_norm else (q, k)
        q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        if x.dtype == DTYPE:
            store_kv(k, v, caches[0], caches[1], slots)
        return q

    name = f"{'norm, ' if with_norm else ''}rotate, store {tokens}, {heads}/{kv_heads}"
    return Case(name, 2 * qkv[0].numel() * DTYPE.itemsize, 0, sets, {"triton": fused, "torch": lambda i: twin(qkv[i])},
                lambda: twin(qkv[0].float()),
                {f"rows {n}": with_constant(rotary, "ROWS", n, fused) for n in (8, 32, 64)}, eager=())


def store_case(tokens: int, kv_heads: int, dim: int) -> Case:
    blocks = -(-tokens // 256)
    caches = torch.zeros(2, blocks, 256, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    kv = torch.randn(2, tokens, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    slots = torch.randperm(blocks * 256, device=DEVICE)[:tokens]

    def run(_: int) -> Tensor:
        store_kv(kv[0], kv[1], caches[0], caches[1], slots)
        return caches

    def expected() -> Tensor:
        wanted = torch.zeros_like(caches)
        store_kv_torch(kv[0], kv[1], wanted[0], wanted[1], slots)
        return wanted

    return Case(f"store KV {tokens} x {kv_heads} x {dim}", 2 * kv.numel() * DTYPE.itemsize, 0, 1,
                {"triton": run}, expected)


def move_case(layers: int, rows: int, kv_heads: int, dim: int) -> Case:
    slots = 2 * rows
    pool = torch.randn(layers, 2, slots, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    order = torch.randperm(slots, device=DEVICE)
    sources, targets = order[:rows], order[rows:]
    first_rows = torch.full((layers,), rows // 50, device=DEVICE)
    angles = torch.randn(dim // 2, device=DEVICE)
    turn = angles.cos(), angles.sin()

    def run(_: int) -> Tensor:
        kv_move.move_kv(pool, sources, targets, first_rows, turn)
        return pool

    def expected() -> Tensor:
        wanted = pool.float()
        moved = wanted[:, :, sources[rows // 50:]]
        first, second = moved[:, 0].chunk(2, dim=-1)
        moved[:, 0] = torch.cat((first * turn[0] - second * turn[1], second * turn[0] + first * turn[1]), dim=-1)
        wanted[:, :, targets[rows // 50:]] = moved
        return wanted

    moved_bytes = 4 * layers * (rows - rows // 50) * kv_heads * dim * DTYPE.itemsize
    return Case(f"move KV {rows} rows, {layers} layers", moved_bytes, 0, 1, {"triton": run}, expected,
                {f"rows {n}": with_constant(kv_move, "ROWS", n, run) for n in (16, 64, 128)})


def draw_case(rows: int, vocab_size: int, filters: bool) -> Case:
    logits = torch.randn(rows, vocab_size, device=DEVICE).mul_(3)
    largest = logits.max(dim=1).values
    keys = torch.randint(-2**31, 2**31, (2, rows, 1), device=DEVICE).to(torch.int32)
    temperature = torch.full((rows, 1), 0.6, device=DEVICE)
    column = {"top_k": torch.full((rows, 1), 20, device=DEVICE), "top_p": torch.full((rows, 1), 0.95, device=DEVICE)}
    group = sampler.RandomRows(None, temperature, keys, 20 if filters else 0, column["top_k"], column["top_p"],
                               torch.full((rows, 1), -5.0, device=DEVICE) if filters else None)

    def fused(_: int) -> Tensor:
        lowest = None
        if filters:
            lowest = sampler.lowest_kept((logits - largest.unsqueeze(1)) / temperature, group)
        return sampling.draw(logits, largest, temperature, keys, lowest, group.log_min_p)

    return Case(f"draw {rows} x {vocab_size}{', top-k 20, top-p' if filters else ''}", logits.numel() * 4, 0, 1,
                {"triton": fused, "torch": lambda i: sampler.draw(logits.clone(), largest, group)},
                lambda: sampler.draw(logits.clone(), largest, group),
                {f"chunk {n}": with_constant(sampling, "CHUNK", n, fused) for n in (1024, 2048, 8192, 16384)}, eager=())


def ranking_cases(rows: int, vocab_size: int) -> Iterator[Case]:
    logits = torch.randn(rows, vocab_size, device=DEVICE).mul_(3)
    scaled = (logits - logits.max(dim=1, keepdim=True).values) / 0.6
    yield Case(f"largest of {rows} x {vocab_size}", logits.numel() * 4, 0, 1, {
        "triton": lambda i: sampling.largest(logits)[1], "torch": lambda i: logits.max(dim=1).indices,
    }, lambda: logits.max(dim=1).indices, eager=())
    for name, k, p in (("top-k 20, top-p 0.95", 20, 0.95), ("top-k 50", 50, 1.0), ("top-p 0.95", vocab_size, 0.95)):
        top_k, top_p = torch.full((rows, 1), k, device=DEVICE), torch.full((rows, 1), p, device=DEVICE)
        group = sampler.RandomRows(None, top_p, top_k, k, top_k, top_p, None)
        kernel_run = partial(lambda top_k, top_p, _: sampling.lowest_kept(scaled, top_k, top_p), top_k, top_p)
        torch_run = partial(lambda group, _: sampler.lowest_kept(scaled, group), group)
        yield Case(f"lowest kept {rows}, {name}", logits.numel() * 4, 0, 1, {"triton": kernel_run, "torch": torch_run},
                   partial(torch_run, 0), {f"chunk {n}": with_constant(sampling, "RANKED_CHUNK", n, kernel_run)
                                           for n in (1024, 2048, 8192)})


def other_cases() -> Iterator[Case]:
    for rows, size in ((256, 1024), (16384, 1024), (10589, 2048), (42196, 1280)) if GPU else ((4, 64),):
        yield norm_case(rows, size)
    for rows, size in ((256, 3072), (16384, 3072), (10589, 11008), (42196, 3420)) if GPU else ((4, 64),):
        yield gate_case(rows, size)
    yield rotate_case(42196 if GPU else 5, 16, 80)
    for tokens, heads, kv_heads, with_norm in (((256, 16, 8, True), (16384, 16, 8, True), (10589, 16, 2, False))
                                               if GPU else ((5, 4, 2, True),)):
        yield project_case(tokens, heads, kv_heads, 128, with_norm)
    yield store_case(16384 if GPU else 5, 8, 128)
    yield move_case(36 if GPU else 2, 10549 if GPU else 50, 2, 128)
    yield from ranking_cases(256 if GPU else 2, 151936 if GPU else 300)
    for filters in (False, True):
        yield draw_case(256 if GPU else 3, 151936 if GPU else 5000, filters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes")
    parser.add_argument("--only", default="", help="only cases whose name holds this word")
    parser.add_argument("--json", help="file for one JSON line a row")
    options = parser.parse_args()
    torch.manual_seed(0)
    print("device", torch.cuda.get_device_name() if GPU else "cpu", "torch", torch.__version__, flush=True)
    rows = []
    with torch.inference_mode():
        for case in (case for cases in (attention_cases, other_cases) for case in cases()):
            if options.only in case.name:
                for row in measure(case, options.sweep):
                    rows.append(row)
                    show(row)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print("\nbest of each case")
    for name in dict.fromkeys(row["case"] for row in rows):
        ours = [row for row in rows if row["case"] == name and row["by"] not in ("fa2", "fa3", "torch") and row["ok"]]
        for row in sorted(ours, key=lambda row: row["ms"])[:3]:
            show(row)
    print("wrong or failed:", [(row["case"], row["by"]) for row in rows if not row["ok"]])


if __name__ == "__main__":
    main()
