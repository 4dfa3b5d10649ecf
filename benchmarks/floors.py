"""The time that a piece of work takes at least on one device or several: bytes over bandwidth, operations over rate."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from time import perf_counter

import torch

from nanovllm.model_config import ModelConfig, TextConfig, VisionConfig

REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    """What each of some equal devices does at best, measured here and now."""

    bytes_per_second: float     # of a copy within its memory, reads and writes together
    flops_per_second: float     # of a large matrix product in the model's dtype
    fabric_bytes_per_second: float = inf        # of a copy to the next device
    ranks: int = 1              # devices that share the model
    vision_ranks: int = 1       # devices that work on one picture


def measure_ceilings(device: torch.device, dtype: torch.dtype, ranks: int = 1, vision_ranks: int = 1) -> Ceilings:
    """Measures copies and a square matrix product; call it before an engine takes the memory.

    ranks: devices from `device` on that share the model; on the CPU they share its cores, and count as one.
    """
    rates = _copy_rate(device, device), _product_rate(device, dtype)
    if device.type == "cpu":
        return Ceilings(*rates)
    fabric = inf if ranks == 1 else _copy_rate(device, torch.device("cuda", (device.index or 0) + 1)) / 2
    torch.cuda.empty_cache()        # an engine sizes its caches by what is free
    return Ceilings(*rates, fabric, ranks, vision_ranks)


def _copy_rate(source: torch.device, target: torch.device) -> float:
    """Bytes read and written together, each second."""
    num_bytes = 1 << (30 if source.type == "cuda" else 27)
    read = torch.ones(num_bytes, dtype=torch.uint8, device=source)
    written = torch.empty_like(read, device=target)
    return 2 * num_bytes / _seconds(lambda: written.copy_(read), target)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 1024
    left, right, product = torch.rand(3, side, side, device=device).to(dtype)
    return 2 * side**3 / _seconds(lambda: torch.mm(left, right, out=product), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of several calls."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return min(times)


# ---------------------------------------------------------------- sizes

def layer_parameters(text: TextConfig) -> int:
    """Parameters of all decoder layers, without embedding and head."""
    width = text.num_heads * text.head_dim
    attention = text.hidden_size * (2 * width + 2 * text.num_kv_heads * text.head_dim)
    return text.num_layers * (attention + 3 * text.hidden_size * text.intermediate_size)


def prompt_parameters(text: TextConfig) -> int:
    """Parameters that every prompt token must be multiplied with: of the last layer, those of keys and values alone,
    since of nearly all tokens nobody asks for logits."""
    before_last = layer_parameters(text) // text.num_layers * (text.num_layers - 1)
    return before_last + 2 * text.hidden_size * text.num_kv_heads * text.head_dim


def step_parameters(text: TextConfig) -> int:
    """Parameters that a decode step reads: the layers and the head."""
    return layer_parameters(text) + text.vocab_size * text.hidden_size


def kv_bytes_per_token(text: TextConfig, itemsize: int) -> int:
    return 2 * text.num_layers * text.num_kv_heads * text.head_dim * itemsize


# ---------------------------------------------------------------- floors, in seconds

def generation_floors(config: ModelConfig, itemsize: int, prompt_lens: Sequence[int], output_lens: Sequence[int],
                      ceilings: Ceilings) -> dict[str, float]:
    """The parts, one after the other: all prompts computed at the peak rate; then every step reads the weights and all
    live KV once; what ranks send each other, which the next layer waits for."""
    text, ranks = config.text, ceilings.ranks
    kv_reads = sum((new - 1) * prompt + new * (new - 1) // 2 for prompt, new in zip(prompt_lens, output_lens))
    weight_reads = (max(output_lens) - 1) * step_parameters(text) * itemsize
    logits = text.vocab_size // ranks * sum(output_lens) * itemsize if ranks > 1 else 0
    sums = sum_bytes(text.hidden_size, 2 * text.num_layers + 1, sum(prompt_lens) + sum(output_lens), itemsize, ranks)
    return dict(
        prompts=2 * prompt_parameters(text) * sum(prompt_lens) / ranks / ceilings.flops_per_second,
        weights=weight_reads / ranks / ceilings.bytes_per_second,
        KV=kv_reads * kv_bytes_per_token(text, itemsize) / ranks / ceilings.bytes_per_second,
        sums=sums / ceilings.fabric_bytes_per_second, logits=logits / ceilings.fabric_bytes_per_second)


def sum_bytes(width: int, sums: int, rows: int, itemsize: int, ranks: int) -> float:
    """What each rank sends for `sums` sums over the ranks of `rows` rows."""
    return 2 * (ranks - 1) / ranks * sums * rows * width * itemsize


def image_call_floor(config: ModelConfig, itemsize: int, num_prompt: int, num_computed: int, num_reused: int,
                     encoded_grids: Sequence[tuple[int, int, int]], ceilings: Ceilings) -> float:
    """One token out: the images encoded, `num_computed` rows computed, the KV of `num_reused` rows moved."""
    text = config.text
    seen = num_computed * (num_prompt - num_computed / 2) * (text.num_layers - 1)       # keys, by queries in all layers
    ranks, vision_ranks = ceilings.ranks, ceilings.vision_ranks
    operations = (2 * prompt_parameters(text) * num_computed + 4 * seen * text.num_heads * text.head_dim) / ranks
    sent = sum_bytes(text.hidden_size, 2 * text.num_layers + 1, num_computed, itemsize, ranks)
    for grid in encoded_grids:
        assert config.vision is not None
        operations += encoder_operations(config.vision, grid) / vision_ranks
        sent += sum_bytes(config.vision.hidden_size, 2 * config.vision.depth, prod(grid), itemsize, vision_ranks)
    weights = step_parameters(text) * itemsize / ranks / ceilings.bytes_per_second
    moved = 2 * num_reused * kv_bytes_per_token(text, itemsize) / ranks / ceilings.bytes_per_second
    return max(operations / ceilings.flops_per_second, weights) + moved + sent / ceilings.fabric_bytes_per_second


def encoder_operations(vision: VisionConfig, grid: tuple[int, int, int]) -> float:
    """Operations of the vision tower for one picture of `grid` (t, h, w) patches."""
    patches, hidden, merge = prod(grid), vision.hidden_size, vision.spatial_merge_size**2
    block = 4 * hidden**2 + 3 * hidden * vision.intermediate_size
    linear = 2 * patches * (vision.patch_dim * hidden + vision.depth * block)
    merger = 2 * (patches / merge) * ((merge * hidden) ** 2 + merge * hidden * vision.out_hidden_size)
    num_full = len(vision.fullatt_block_indexes)
    window = min((vision.window_size // vision.patch_size) ** 2, patches)
    seen = num_full * patches / grid[0] + (vision.depth - num_full) * window      # patches seen by one, all layers
    return linear + merger + 4 * patches * seen * hidden
