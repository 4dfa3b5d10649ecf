"""Runs spans of several sequences through paged KV whose unused slots are NaN, built token by token."""
from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.attention.contract import SpanBatch
from nanovllm.models.decoder import CausalLM
from nanovllm.models.layer_stage import LayerStage

Span = tuple[int, int, int]     # sequence, first token, token behind the last


class Pages:
    """Block tables in random order for sequences of given lengths, with one spare block."""

    def __init__(self, lengths: Sequence[int], block_size: int, rng: random.Random) -> None:
        needed = [-(-length // block_size) for length in lengths]
        free = list(range(sum(needed) + 1))
        rng.shuffle(free)
        self.num_blocks, self.block_size = len(free), block_size
        self.tables = [[free.pop() for _ in range(count)] for count in needed]

    def slot(self, seq: int, token: int) -> int:
        return self.tables[seq][token // self.block_size] * self.block_size + token % self.block_size

    def batch(self, spans: Sequence[Span], device: torch.device | str = "cpu") -> SpanBatch:
        q_lens = tuple(stop - start for _, start, stop in spans)
        k_lens = tuple(stop for _, _, stop in spans)
        width = max(len(self.tables[seq]) for seq, _, _ in spans)
        return SpanBatch(
            cu_seqlens_q=torch.tensor([sum(q_lens[:i]) for i in range(len(spans) + 1)], dtype=torch.int32).to(device),
            seqlens_k=torch.tensor(k_lens, dtype=torch.int32).to(device),
            block_tables=torch.tensor([self.tables[seq] + [0] * (width - len(self.tables[seq]))
                                       for seq, _, _ in spans], dtype=torch.int32).to(device),
            slot_mapping=torch.tensor([self.slot(seq, token) for seq, start, stop in spans
                                       for token in range(start, stop)]).to(device),
            q_lens=q_lens, k_lens=k_lens, max_seqlen_q=max(q_lens), max_seqlen_k=max(k_lens))

    def cache(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """NaN of `[*shape[:-2], blocks, block_size, *shape[-2:]]`."""
        return torch.full((*shape[:-2], self.num_blocks, self.block_size, *shape[-2:]), float("nan"), dtype=dtype,
                          device=device)


def random_spans(length: int, seq: int, rng: random.Random, count: int) -> list[Span]:
    """At most `count` spans that tile a sequence; the last one often of a single token."""
    cuts = {0, length, *(rng.randrange(1, length) for _ in range(count - 2)), length - 1}
    return [(seq, start, stop) for start, stop in pairwise(sorted(cuts))]


def random_steps(lengths: Sequence[int], rng: random.Random, count: int = 5) -> list[list[Span]]:
    """All sequences cut into spans, dealt to steps: several sequences and several spans of one in the same step."""
    queues = [random_spans(length, seq, rng, count) for seq, length in enumerate(lengths)]
    steps: list[list[Span]] = []
    while any(queues):
        step: list[Span] = []
        for queue in queues:
            take = rng.randint(0 if step else 1, 3)
            step += [queue.pop(0) for _ in range(min(take, len(queue)))]
        if step:
            steps.append(step)
    return steps


def new_cache(model: CausalLM, pages: Pages) -> Tensor:
    attention = model.model.layers[0].self_attn
    kv_heads = attention.qkv_proj.parts["k_proj"].size // attention.head_dim
    weight = model.model.norm.weight
    return pages.cache(len(model.model.layers), 2, kv_heads, attention.head_dim, dtype=weight.dtype,
                       device=weight.device)


def run_spans(
    model: CausalLM, embeddings: Sequence[Tensor], positions: Sequence[Tensor], steps: Sequence[Sequence[Span]],
    pages: Pages, kv_cache: Tensor,
) -> list[Tensor]:
    """Logits `[tokens, vocab]` of each sequence of embeddings `[tokens, hidden]` at positions `[axes, tokens]`."""
    logits: list[list[Tensor]] = [[] for _ in embeddings]
    device = embeddings[0].device
    for spans in steps:
        hidden = torch.cat([embeddings[seq][start:stop] for seq, start, stop in spans])
        places = torch.cat([positions[seq][:, start:stop] for seq, start, stop in spans], dim=1)
        batch = pages.batch(spans, device)
        out = model(hidden, places, kv_cache, [LayerStage(0, None, batch)])
        for (seq, _, _), rows in zip(spans, model.compute_logits(out).float().split(batch.q_lens)):
            logits[seq].append(rows)
    return [torch.cat(parts) for parts in logits]
