"""Which backend is chosen where, and that flash and triton agree with torch in float32 for every shape of span."""
from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
import torch

from nanovllm.attention import AttentionBackend, select_backend
from nanovllm.attention.torch_backend import TorchBackend
from tests.interpreted import run_interpreted, run_python
from tests.paged import Pages, Span

# Of sequences of these lengths, by what is special about the spans; blocks are of 256 tokens on the GPU.
LENGTHS = [700, 256, 513, 40, 1, 3000]
SHAPES: dict[str, list[Span]] = {
    "decode": [(seq, n - 1, n) for seq, n in enumerate(LENGTHS)],
    "whole prompts": [(seq, 0, n) for seq, n in enumerate(LENGTHS)],
    "chunk border": [(0, 128, 640), (2, 300, 513), (5, 1000, 2024)],
    "n + 1 spans of a sequence": [(0, 0, 30), (0, 200, 230), (0, 600, 700), (5, 10, 11), (5, 2000, 2100),
                                  (5, 2999, 3000)],
    "block edge": [(0, 255, 257), (1, 255, 256), (2, 256, 512), (5, 0, 256), (5, 511, 513)],
    "tail of one token": [(0, 0, 64), (0, 699, 700), (2, 0, 511), (2, 512, 513)],
    "decodes before a prefill": [*[(seq, n - 1, n) for seq, n in enumerate(LENGTHS)], (3, 0, 40), (5, 100, 1500)],
}
HEADS = [(16, 8, 128), (16, 2, 128), (28, 4, 128), (7, 1, 80), (4, 4, 64), (6, 2, 96), (3, 3, 16)]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}     # of values of size 1


def check_shape(backend: AttentionBackend, lengths: list[int], spans: list[Span], heads: tuple[int, int, int],
                block_size: int, dtype: torch.dtype, device: str) -> None:
    num_heads, kv_heads, dim = heads
    generator = torch.Generator(device).manual_seed(dim)
    pages, truth = Pages(lengths, block_size, random.Random(dim)), TorchBackend()
    # Unused slots stay NaN, or for flash 3, which multiplies them by 0, a large number.
    k_cache, v_cache = pages.cache(2, kv_heads, dim, dtype=dtype, device=device)
    if type(backend).__name__ == "FlashAttention3":
        v_cache.fill_(1e4)
    for seq, n in enumerate(lengths):
        k, v = torch.randn(2, n, kv_heads, dim, device=device, generator=generator).to(dtype)
        backend.store_kv(k, v, k_cache, v_cache, pages.batch([(seq, 0, n)], device).slot_mapping)
    batch = pages.batch(spans, device)
    q = torch.randn(sum(batch.q_lens), num_heads, dim, device=device, generator=generator).to(dtype)
    out = backend.attend(q, k_cache, v_cache, batch, dim**-0.5)
    expected = truth.attend(q.float(), k_cache.float(), v_cache.float(), batch, dim**-0.5)
    assert out.shape == q.shape and out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_padding(backend: AttentionBackend, dtype: torch.dtype, device: str) -> None:
    """Rows of a span with no keys, as they pad a graph's batch, are finite and change no other row."""
    pages = Pages([300, 20], 256, random.Random(0))
    k_cache, v_cache = torch.randn(2, pages.num_blocks, 256, 2, 64, device=device).to(dtype)
    spans = pages.batch([(0, 299, 300), (1, 19, 20), (1, 18, 19)], device)
    q = torch.randn(3, 4, 64, device=device).to(dtype)
    full = backend.attend(q, k_cache, v_cache, spans, 0.125)
    filled = torch.tensor([1, 1, 0], dtype=torch.int32, device=device)
    empty = replace(spans, seqlens_k=spans.seqlens_k * filled, k_lens=(300, 20, 0))
    out = backend.attend(q, k_cache, v_cache, empty, 0.125)
    assert out.isfinite().all() and torch.equal(out[:2], full[:2])


def check_encode(backend: AttentionBackend, seqlens: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype,
                 device: str) -> None:
    qkv = torch.randn(sum(seqlens), 3, heads, dim, generator=torch.Generator().manual_seed(dim)).to(device, dtype)
    cu_seqlens = torch.tensor([0, *seqlens], device=device).cumsum(0).to(torch.int32)
    out = backend.encode(*qkv.unbind(1), cu_seqlens, seqlens, dim**-0.5)
    expected = TorchBackend().encode(*qkv.float().unbind(1), cu_seqlens, seqlens, dim**-0.5)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_splits(splits: int, least: int, keys: int, one_query: bool, device: str) -> None:
    """Ranges that all the splits share, some of them, and one; the launch leaves its counters as it found them."""
    from nanovllm.kernels.attention import Tiles, attend, num_tiles

    lengths, (heads, kv_heads, dim) = [17 * keys + 3, 5 * keys, keys - 1, 1], (4, 2, 24)
    pages = Pages(lengths, 2 * keys, random.Random(splits))
    k_cache, v_cache = torch.randn(2, pages.num_blocks, 2 * keys, kv_heads, dim).to(device)
    queries = [(0, 1), (1, 1), (2, 1), (3, 1)] if one_query else [(0, 21), (1, 5), (2, keys - 1), (3, 1)]
    batch = pages.batch([(seq, lengths[seq] - n, lengths[seq]) for seq, n in queries], device)
    q, tiles = torch.randn(sum(batch.q_lens), heads, dim).to(device), Tiles(16, keys, 4, 2, splits, least)
    arrivals = torch.zeros(num_tiles(len(q), len(lengths), heads, kv_heads, tiles, one_query), dtype=torch.int32,
                           device=device)
    expected = TorchBackend().attend(q, k_cache, v_cache, batch, 0.3)
    for _ in range(2):      # the second finds the counters of the first
        out = torch.full_like(q, float("nan"))
        attend(q, k_cache, v_cache, out, batch.cu_seqlens_q, 0.3, tiles, batch.seqlens_k, batch.block_tables,
               one_query, arrivals)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert not arrivals.any()


SPLITS = [(2, 1), (3, 4), (8, 1), (16, 2), (16, 4)]     # splits, turns of the loop that each has at least


def check_triton_on_cpu() -> None:
    from nanovllm.attention.triton_backend import TritonBackend

    backend, lengths = TritonBackend(torch.device("cpu")), [37, 16, 1, 50]
    decode: list[Span] = [(seq, n - 1, n) for seq, n in enumerate(lengths)]
    mixed: list[Span] = [*decode, (0, 3, 20), (1, 0, 16), (3, 15, 17), (3, 30, 50)]
    for heads, block_size in (((2, 1, 64), 16), ((7, 1, 80), 48), ((2, 2, 96), 32), ((2, 1, 128), 64)):
        check_shape(backend, lengths, mixed, heads, block_size, torch.float32, "cpu")
    check_shape(backend, lengths, decode, (2, 1, 64), 16, torch.float16, "cpu")
    for splits, least in SPLITS:
        for one_query in (True, False):
            check_splits(splits, least, 16, one_query, "cpu")
    check_padding(backend, torch.float32, "cpu")
    check_encode(backend, (16, 4, 4, 9), 2, 80, torch.float32, "cpu")
    check_encode(backend, (70, 1), 1, 24, torch.float16, "cpu")


def test_interpreted_triton_equals_torch():
    run_interpreted(__name__, "check_triton_on_cpu")


def test_cpu_needs_no_triton():
    run_python("import sys; sys.modules['triton'] = None\nimport nanovllm.models.registry\n"
               "from nanovllm.attention import select_backend; select_backend('auto', 'cpu')")


def test_names_and_devices_are_checked():
    assert isinstance(select_backend("torch", torch.device("cuda", 1)), TorchBackend)
    for name in ("triton", "flash"):
        with pytest.raises(ValueError, match=f"'{name}'.*'cpu'.*torch"):
            select_backend(name, "cpu")


@pytest.mark.gpu
def test_auto_prefers_flash_and_falls_back_to_triton(monkeypatch):
    assert type(select_backend("auto", "cuda", torch.float32)).__name__ == "TritonBackend"
    for module in ("flash_attn_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, module, None)
    assert type(select_backend("auto", "cuda")).__name__ == "TritonBackend"
    with pytest.raises(ValueError, match="flash_attn.*triton"):
        select_backend("flash", "cuda")


def gpu_backend(name: str) -> AttentionBackend:
    """Skips the test where the backend's package is not installed."""
    from nanovllm.attention.flash import FlashAttention2, FlashAttention3

    if name == "triton":
        return select_backend("triton", "cuda")
    version = {"flash 3": FlashAttention3, "flash 2": FlashAttention2}[name]
    if name == "flash 3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    try:
        return version()
    except ImportError as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["triton", "flash 3", "flash 2"])
def backend(request) -> AttentionBackend:
    return gpu_backend(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_backends_equal_torch_within_rounding(backend, heads, shape):
    check_shape(backend, LENGTHS, SHAPES[shape], heads, 256, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_takes_other_dtypes_and_block_sizes(shape, block_size, dtype):
    check_shape(gpu_backend("triton"), LENGTHS, SHAPES[shape], (16, 2, 128), block_size, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("one_query", [True, False])
@pytest.mark.parametrize("splits,least", SPLITS)
def test_splits_of_a_range_add_up(splits, least, one_query):
    check_splits(splits, least, 32, one_query, "cuda")


@pytest.mark.gpu
def test_padding_rows_are_harmless(backend):
    check_padding(backend, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_a_captured_decode_follows_the_numbers_on_the_device(backend):
    pages = Pages([700, 256, 513], 256, random.Random(0))
    k_cache, v_cache = torch.randn(2, pages.num_blocks, 256, 2, 128, device="cuda").bfloat16()
    long, short = (pages.batch([(seq, n - 1, n) for seq, n in enumerate(lengths)], "cuda")
                   for lengths in ((700, 256, 513), (1, 200, 300)))
    q = torch.randn(3, 16, 128, device="cuda").bfloat16()
    backend.attend(q, k_cache, v_cache, long, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, k_cache, v_cache, long, 0.1)
    long.seqlens_k.copy_(short.seqlens_k)
    long.block_tables[1] = long.block_tables[2]
    graph.replay()
    expected = TorchBackend().attend(q.float(), k_cache.float(), v_cache.float(), replace(
        short, block_tables=long.block_tables), 0.1)
    torch.testing.assert_close(out.float(), expected, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlens", [(1000,), (64,) * 40 + (20,), (16, 16, 4, 4, 9), (1, 300, 300, 1)], ids=len)
@pytest.mark.parametrize("heads,dim", [(16, 80), (2, 64), (3, 16)])
def test_encode_equals_torch(backend, heads, dim, seqlens):
    check_encode(backend, seqlens, heads, dim, torch.bfloat16, "cuda")
