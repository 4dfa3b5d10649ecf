"""All kernels but attention, at the sizes of the published models."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from kernel_case import DEVICE, DTYPE, GPU, ROTATED_BYTES, Case, Run
from torch import Tensor

from nanovllm.attention.torch_backend import store_kv_torch
from nanovllm.kernels import activation, kv_move, norm, rotary, sampling
from nanovllm.kernels.kv_store import store_kv
from nanovllm.layers import sampler
from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary


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


def sample_case(rows: int, vocab_size: int, greedy: bool) -> Case:
    """What decode graphs do with the head's own output."""
    logits = torch.randn(rows, vocab_size, device=DEVICE).mul_(3).to(DTYPE)
    keys = torch.randint(-2**31, 2**31, (2, rows, 1), device=DEVICE).to(torch.int32)
    temperature = torch.full((rows, 1), 0.6, device=DEVICE)
    flags = torch.full((rows,), int(greedy), dtype=torch.int32, device=DEVICE)

    def fused(_: int) -> Tensor:
        return sampling.sample(logits, temperature, keys, flags)[0]

    def expected() -> Tensor:
        wide, largest = logits.float(), logits.float().max(dim=1)
        group = sampler.RandomRows(None, temperature, keys, 0, None, None, None)
        return largest.indices if greedy else sampler.draw(wide, largest.values, group)

    return Case(f"sample {rows} x {vocab_size}{', greedy' if greedy else ''}", logits.numel() * logits.itemsize, 0, 1,
                {"triton": fused, "torch": lambda i: expected()}, expected,
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
    for flag in (False, True):
        yield draw_case(256 if GPU else 3, 151936 if GPU else 5000, filters=flag)
        yield sample_case(256 if GPU else 3, 151936 if GPU else 5000, greedy=flag)
