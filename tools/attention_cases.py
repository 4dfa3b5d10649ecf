"""Attention at the sizes of the published models: decodes, prefills, warm images, vision segments."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from kernel_case import DEVICE, DTYPE, GPU, ROTATED_BYTES, Case, Run
from torch import Tensor

from benchmarks.generation import FULL_SIZE, MAX_ID, throughput_work
from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.attention.flash import FlashAttention2, FlashAttention3
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import MAX_RANGES, TritonBackend
from nanovllm.kernels import attention as kernel
from nanovllm.kernels.attention import Tiles
from nanovllm.runner.span_graph import MAX_SPANS


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
               grid: Sequence[Tiles] = (), one_sequence: bool = False, block_size: int = 256, bucket: int = 0) -> Case:
    """Spans of (queries, keys), each of a sequence of its own unless they are all of one; with a bucket, as a captured
    step of so many tokens has them."""
    width = -(-max(k for _, k in lengths) // block_size)
    num_blocks = width * (1 if one_sequence else len(lengths))
    kv_bytes = num_blocks * block_size * kv_heads * dim * 2 * DTYPE.itemsize
    sets = max(1, min(32, ROTATED_BYTES // kv_bytes)) if GPU else 1
    caches = torch.randn(sets, 2, num_blocks, block_size, kv_heads, dim, device=DEVICE, dtype=DTYPE)
    tables = torch.randperm(num_blocks, device=DEVICE).to(torch.int32).view(-1, width).expand(len(lengths), width)
    real, scale = spans_of(lengths, tables.contiguous(), block_size), dim**-0.5
    spans, rows = (captured(real, bucket) if bucket else real), sum(real.q_lens)
    q = torch.randn(bucket or rows, heads, dim, device=DEVICE, dtype=DTYPE)
    arrivals = torch.zeros(MAX_RANGES, dtype=torch.int32, device=DEVICE)
    pairs = sum(m * (n - m) + m * (m + 1) / 2 for m, n in lengths)
    keys_read = max(real.k_lens) if one_sequence else sum(real.k_lens)

    def by(tiles: Tiles) -> Run:
        def run(i: int) -> Tensor:
            out = torch.empty_like(q)
            kernel.attend(q, caches[i, 0], caches[i, 1], out, spans.cu_seqlens_q, scale, tiles, spans.seqlens_k,
                          spans.block_tables, spans.max_seqlen_q == 1, arrivals)
            return out[:rows]
        return run

    def by_backend(backend: AttentionBackend, i: int) -> Tensor:
        return backend.attend(q, caches[i, 0], caches[i, 1], spans, scale)[:rows]

    def expected() -> Tensor:
        k_cache, v_cache = caches[0].float()
        return TorchBackend().attend(q[:rows].float(), k_cache, v_cache, real, scale)

    return Case(
        name, keys_read * kv_heads * dim * 2 * DTYPE.itemsize + 2 * q.numel() * DTYPE.itemsize, 4 * pairs * heads * dim,
        sets, {key: partial(by_backend, backend) for key, backend in backends().items()},
        expected, {str(tuple(vars(tiles).values())): by(tiles) for tiles in grid})


def captured(spans: SpanBatch, bucket: int) -> SpanBatch:
    """The spans as a graph of `bucket` tokens is captured with: empty ones behind them, lengths only on the device."""
    empty = MAX_SPANS - len(spans.q_lens)
    cu_seqlens_q = torch.cat((spans.cu_seqlens_q, spans.cu_seqlens_q[-1:].expand(empty)))
    seqlens_k, tables = torch.nn.functional.pad(spans.seqlens_k, (0, empty), value=1), spans.block_tables
    tables = torch.nn.functional.pad(tables, (0, 128 - tables.shape[1], 0, empty))
    return replace(spans, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, block_tables=tables,
                   q_lens=(bucket,) * MAX_SPANS, k_lens=(), max_seqlen_q=bucket, max_seqlen_k=128 * 256)


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


def decode_grid(splits: Sequence[int], shapes: int = 4, least: Sequence[int] = (4,)) -> list[Tiles]:
    return [Tiles(16, keys, warps, stages, n, turns)
            for (keys, warps, stages), n, turns in product(DECODE_SHAPES[:shapes], splits, least)]


def text_lengths(num_running: int) -> list[int]:
    """KV lengths of the text benchmark's requests (seed 0) when so many are left, in the order that they came."""
    work = throughput_work(0, *FULL_SIZE, MAX_ID + 1)
    step = sorted(work.output_lens, reverse=True)[num_running - 1] - 1
    return [len(prompt) + step for prompt, new in zip(work.prompts, work.output_lens) if new > step]


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
    for running in (192, 128, 96, 64, 48, 32, 16, 8):
        yield paged_case(f"decode last {running} of text, 16/8", [(1, n) for n in text_lengths(running)], 16, 8, 128,
                         decode_grid([1, 2, 4, 8, 16][:2 if running > 64 else 5], 2, (2, 4, 6, 8)))
    for running in (32, 8, 1):
        yield paged_case(f"decode {running} x 350, 16/8", [(1, 350)] * running, 16, 8, 128,
                         decode_grid([1, 2, 4, 8], 3, (1, 2, 3, 4, 6)))
    yield paged_case("decode 1 x 10589, 16/2", [(1, 10589)], 16, 2, 128, decode_grid([16, 32, 64]))
    yield paged_case("decode 64 x 1024, 28/4", [(1, 1024)] * 64, 28, 4, 128)
    yield paged_case("prefill 10240, 16/2", [(10240, 10240)], 16, 2, 128, PREFILL_GRID)
    yield paged_case("prefill 16 x 1024, 16/8", [(1024, 1024)] * 16, 16, 8, 128, PREFILL_GRID)
    short = [replace(tiles, splits=n, least=turns) for tiles in PREFILL_GRID[:8] for n, turns in (
        (8, 4), (16, 4), (16, 8), (32, 4))]
    for rows, bucket in ((240, 320), (560, 640), (1080, 1152), (1900, 2048)):
        yield paged_case(f"warm image {rows} + 26 of 10589", [(rows, rows + 10), (26, 10589)], 16, 2, 128, short,
                         one_sequence=True, bucket=bucket)
    yield paged_case("short prompts in a graph", [(100, 100)] * 8, 16, 8, 128, short, bucket=1024)
    yield paged_case("a prompt in a graph", [(1000, 1000)], 16, 8, 128, short, bucket=1024)
    yield paged_case("128 decodes and a prefill of 2048", [(1, 1024)] * 128 + [(2048, 2048)], 16, 8, 128)
    yield segment_case("vision full 8192, 16 x 80", [8192], 16, 80, [], True)
    yield segment_case("vision full 42196, 16 x 80", [42196], 16, 80, PREFILL_GRID, False)
    yield segment_case("vision windows of 64", [64] * 659 + [20], 16, 80,
                       [*PREFILL_GRID[:4], Tiles(64, 32, 4, 2)], True)
