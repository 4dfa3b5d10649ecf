"""The largest step that an engine's options allow, and the memory that it leaves for the caches."""
from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.plan import SamplingBatch, SpanTable, Stage, StepPlan
from nanovllm.runner.span_graph import bucket_sizes

MAX_PATCHES_A_CALL = 65536          # of the vision tower: a picture of 3584 x 3584 pixels
RESERVE_BYTES = 256 << 20           # for what the allocator cannot use between its blocks, and what graphs work in
GIB = 1 << 30


def max_patches_a_call(config: Config) -> int:
    """Patches that the vision tower gets in one call at most: of the largest picture that fits max_model_len, up to
    `MAX_PATCHES_A_CALL`; 0 without vision."""
    vision = config.model_config.vision
    return 0 if vision is None else min(config.max_model_len * vision.spatial_merge_size**2, MAX_PATCHES_A_CALL)


def largest_picture(config: Config) -> tuple[int, int, int]:
    """Grid (t, h, w) in patches of an almost square picture of `max_patches_a_call`."""
    vision = config.model_config.vision
    assert vision is not None, "a text model takes no pictures"
    merge = vision.spatial_merge_size
    rows = max_patches_a_call(config) // merge**2
    height = math.isqrt(rows)
    return 1, height * merge, rows // height * merge


def num_warm_up_blocks(config: Config) -> int:
    """KV blocks that `largest_step` writes to."""
    return -(-config.max_model_len // config.kvcache_block_size)


def num_position_axes(config: Config) -> int:
    """Axes of a rotary position: 1 for text models, 3 (t, h, w) for M-RoPE."""
    return 1 if config.model_config.text.rope.mrope_section is None else 3


def largest_step(config: Config, logprobs: bool = True) -> StepPlan:
    """A step of max_num_batched_tokens tokens that asks for all max_num_seqs next tokens, sampled with every filter.

    Its spans end at max_model_len, so that their KV ranges are as long as can be, and all write to the same blocks.
    Without `logprobs` it takes no index from what kernels compute, as `FusedOps.compile_ahead` wants it.
    """
    num_tokens = config.max_num_batched_tokens
    full, rest = divmod(num_tokens, config.max_model_len)
    lengths = np.array([config.max_model_len] * full + [rest] * (rest > 0), np.int64)
    tables = np.tile(np.arange(num_warm_up_blocks(config), dtype=np.int32), (len(lengths), 1))
    spans = SpanTable(config.max_model_len - lengths, lengths, tables, np.zeros(len(lengths), np.int64))
    axes = num_position_axes(config)
    positions = np.concatenate([np.arange(config.max_model_len - n, config.max_model_len) for n in lengths])
    num_rows = min(config.max_num_seqs, num_tokens)
    return StepPlan(token_ids=np.zeros(num_tokens, np.int64), positions=np.tile(positions, (axes, 1)),
                    stages=(Stage(0, None, spans),), logits_rows=np.arange(num_rows),
                    sampling=_sampling_with_everything(num_rows, logprobs))


def _sampling_with_everything(num_rows: int, logprobs: bool) -> SamplingBatch:
    def full(value: float) -> np.ndarray:
        return np.full(num_rows, value, np.float32)

    zeros = np.zeros(num_rows, np.int64)
    return SamplingBatch(temperature=full(0.7), top_k=zeros, top_p=full(0.9), min_p=full(0.01), seed=zeros,
                         token_index=zeros, repetition_penalty=full(1), seq_rows=zeros,
                         num_logprobs=(1,) * num_rows if logprobs else ())


def graph_bytes(config: Config, itemsize: int) -> int:
    """Bytes that CUDA graphs keep: the logits of the largest batch, and what the gate of the longest captured prefill
    takes in and gives, of `itemsize` bytes a value."""
    if config.enforce_eager:
        return 0
    text, tokens = config.model_config.text, max(bucket_sizes(config.max_num_batched_tokens), default=0)
    return (config.max_num_seqs * text.vocab_size + 3 * tokens * text.intermediate_size) * itemsize


def cache_budget(config: Config, device: torch.device, allocated_before: int, graphs: int) -> int:
    """Bytes that the caches may take on a GPU, right after a warm-up whose peak the allocator still knows.

    `gpu_memory_utilization` is the share of the card that this engine's tensors may fill: weights, the activations of
    the largest step, what CUDA graphs keep (`graphs` bytes), and caches. What other processes, or other engines of this
    process (`allocated_before` bytes), hold is not counted against that share; but the caches never take more than is
    free. CUDA's own context (about 0.5 GiB) comes on top. Raises ValueError with the numbers if nothing is left.
    """
    allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return budget_of(total, config.gpu_memory_utilization, peak - allocated_before, free, peak - allocated, graphs)


def budget_of(total: int, utilization: float, own_peak: int, free: int, activations: int, graphs: int) -> int:
    """What is left for caches, in bytes, of the engine's share of a card of `total` bytes and of what is `free` on it.

    own_peak: weights and activations of the largest step; activations: the part of it that is not allocated now;
    graphs: what graphs will keep.
    """
    budget = min(int(total * utilization) - own_peak, free - activations) - graphs - RESERVE_BYTES
    if budget <= 0:
        raise ValueError(
            f"no memory is left for the KV cache: gpu_memory_utilization={utilization} of {total / GIB:.2f} GiB is "
            f"{total * utilization / GIB:.2f} GiB; weights and the largest step take {own_peak / GIB:.2f} GiB, CUDA "
            f"graphs {graphs / GIB:.2f} GiB, and {free / GIB:.2f} GiB of the card are free, of which a step needs "
            f"{activations / GIB:.2f} GiB; raise gpu_memory_utilization, lower max_num_batched_tokens, max_num_seqs or "
            "max_model_len, or free memory on the card")
    return budget
