"""The torch backend against sums written out token by token."""
from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.attention.torch_backend import TorchBackend, _groups, store_kv_torch
from tests.paged import Pages, Span, random_steps

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Query i of m sees the first n - m + i + 1 of n keys; q `[m, heads, dim]`, k and v `[n, kv_heads, dim]`."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + i + 1
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[:visible, kv_head].double() @ q[i, head].double() * scale
            out[i, head] = scores.softmax(0) @ v[:visible, kv_head].double()
    return out


def check_spans(lengths: list[int], steps: list[list[Span]], heads: tuple[int, int], dim: int, block_size: int,
                dtype: torch.dtype, device: str) -> None:
    rng = random.Random(len(lengths))
    pages, generator = Pages(lengths, block_size, rng), torch.Generator().manual_seed(0)
    num_heads, kv_heads = heads

    def draw(length: int, count: int) -> Tensor:
        return torch.randn(length, count, dim, generator=generator).to(dtype)

    sequences = [(draw(n, num_heads), draw(n, kv_heads), draw(n, kv_heads)) for n in lengths]
    k_cache, v_cache = pages.cache(2, kv_heads, dim, dtype=dtype, device=device)
    backend, scale = TorchBackend(), dim**-0.5
    for spans in steps:
        batch = pages.batch(spans, device)
        q, k, v = (torch.cat([sequences[seq][part][start:stop] for seq, start, stop in spans]).to(device)
                   for part in range(3))
        backend.store_kv(k, v, k_cache, v_cache, batch.slot_mapping)
        out = backend.attend(q, k_cache, v_cache, batch, scale)
        assert out.shape == q.shape and out.dtype == dtype
        for (seq, start, stop), rows in zip(spans, out.cpu().split(batch.q_lens)):
            q_all, k_all, v_all = sequences[seq]
            expected = attend_slowly(q_all[start:stop], k_all[:stop], v_all[:stop], scale)
            assert (rows.double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads,dim,block_size", [((4, 2), 32, 4), ((6, 2), 80, 16), ((3, 3), 16, 4), ((8, 1), 24, 16)])
def test_spans_of_several_sequences(heads, dim, block_size, dtype, device):
    lengths = [37, 5, 16]
    check_spans(lengths, random_steps(lengths, random.Random(dim)), heads, dim, block_size, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_batch_of_unequal_lengths(dtype, device):
    lengths = [33, 2, 64, 17]
    prompts = [[(seq, 0, n - 1)] for seq, n in enumerate(lengths)]
    decode = [[(seq, n - 1, n) for seq, n in enumerate(lengths)]]
    check_spans(lengths, prompts + decode, (4, 2), 32, 16, dtype, device)


@pytest.mark.parametrize("limit", [0, 20, 50, 80, 10_000])
def test_decode_batch_cut_where_padding_grows_too_large(monkeypatch, limit):
    lengths = [9, 40, 25, 3, 4]
    last = [(seq, n - 1, n) for seq, n in enumerate(lengths)]
    steps = [[(seq, 0, n - 1) for seq, n in enumerate(lengths)], [*last, (0, 2, 7), last[1], last[0]]]
    monkeypatch.setattr("nanovllm.attention.torch_backend.PADDED_VALUES_ON_CPU", limit * 2 * 32)
    check_spans(lengths, steps, (4, 2), 32, 16, torch.float32, "cpu")


def test_groups_hold_single_queries_up_to_the_limit():
    pages = Pages([50] * 6, 16, random.Random(0))
    spans = [(0, 9, 10), (1, 19, 20), (2, 9, 10), (3, 0, 5), (4, 7, 9), (5, 0, 1), (0, 0, 1), (1, 49, 50), (2, 0, 1)]
    groups = _groups(pages.batch(spans), limit=40)
    assert [(g.start, g.stop) for g in groups] == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 7), (7, 8), (8, 9)]


def test_two_spans_of_one_sequence_around_reused_rows():
    """Partial recompute: the rows between the spans are in the cache already, the second span sees them all."""
    steps = [[(0, 0, 30)], [(0, 0, 10), (1, 0, 7), (0, 25, 30)]]
    check_spans([30, 7], steps, (4, 2), 32, 4, torch.float32, "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlens", [(5,), (4, 4, 4), (16, 16, 4, 4, 9), (1, 30, 30, 1)], ids=str)
def test_encode_keeps_to_its_segments(seqlens, device):
    total, dim = sum(seqlens), 20
    q, k, v = torch.randn(3, total, 3, dim, generator=torch.Generator().manual_seed(1)).unbind(0)
    cu_seqlens = torch.tensor([sum(seqlens[:i]) for i in range(len(seqlens) + 1)], dtype=torch.int32)
    out = TorchBackend().encode(*(x.to(device) for x in (q, k, v)), cu_seqlens.to(device), seqlens, dim**-0.5).cpu()
    for first, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        scores = torch.einsum("qhd,khd->hqk", q[first:stop], k[first:stop]) / math.sqrt(dim)
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[first:stop])
        torch.testing.assert_close(out[first:stop], expected, rtol=0, atol=1e-5)


def test_store_skips_minus_one_and_takes_views():
    k_cache, v_cache = torch.zeros(2, 3, 4, 2, 5)
    qkv = torch.randn(6, 9, 5)
    slots = torch.tensor([11, -1, 0, 7, -1, 4])
    store_kv_torch(qkv[:, 3:5], qkv[:, 7:9], k_cache, v_cache, slots)
    for cache, new in ((k_cache, qkv[:, 3:5]), (v_cache, qkv[:, 7:9])):
        expected = torch.zeros(12, 2, 5)
        expected[[11, 0, 7, 4]] = new[[0, 2, 3, 5]]
        assert torch.equal(cache.view(12, 2, 5), expected)


def test_backends_are_chosen_by_name():
    assert isinstance(select_backend("auto", "cpu"), TorchBackend)
    assert isinstance(select_backend("torch", torch.device("cuda", 1)), TorchBackend)
    with pytest.raises(ValueError, match="'flsh'.*torch"):
        select_backend("flsh", "cpu")
    with pytest.raises(ValueError, match="'mps'.*cuda"):
        select_backend("auto", "mps")
