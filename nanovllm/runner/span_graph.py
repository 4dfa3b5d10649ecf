"""Short prefills as CUDA graphs: at a few hundred tokens, as a returning image leaves them, launches cost more than
arithmetic."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.contract import SpanBatch
from nanovllm.models.decoder import CausalLM
from nanovllm.models.layer_stage import FinalRows, LayerStage
from nanovllm.plan import StepPlan
from nanovllm.runner.cuda_graph import GraphMemory
from nanovllm.runner.inputs import row_spans, span_slots
from nanovllm.runner.staging import Shape, StagingBuffer, packed_bytes, packed_views

MAX_SPANS = 16      # of a captured step, and rows that want logits


def bucket_sizes(max_tokens: int) -> list[int]:
    """Token counts with a graph of their own, up to 2048 and no more than a step may have; closer together where
    rows that fill a step up would be a large part of it."""
    # From 256 rows to 320 a layer's products take a quarter longer, to 288 an eighth (docs/log.md).
    sizes = [16, 32, 64, 128, 192, 256, 288, *range(320, 512, 64), *range(512, 2049, 128)]
    return [size for size in sizes if size <= max_tokens]


@dataclass(frozen=True)
class SpanInputs:
    """What one graph reads beside the embeddings, on the device, or the same arrays on the host."""

    positions: Tensor       # int64 [axes, size]
    slot_mapping: Tensor    # int64 [size]
    cu_seqlens_q: Tensor    # int32 [MAX_SPANS + 1]
    seqlens_k: Tensor       # int32 [MAX_SPANS]
    block_tables: Tensor    # int32 [MAX_SPANS, width]
    final_rows: Tensor      # int64 [MAX_SPANS] rows that want logits
    final_seqlens: Tensor   # int32 [MAX_SPANS] their KV ranges
    final_tables: Tensor    # int32 [MAX_SPANS, width]

    @staticmethod
    def shapes(size: int, num_axes: int, width: int) -> list[Shape]:
        """dtype and shape of each array, in the order of the fields."""
        return [(torch.int64, (num_axes, size)), (torch.int64, (size,)), (torch.int32, (MAX_SPANS + 1,)),
                (torch.int32, (MAX_SPANS,)), (torch.int32, (MAX_SPANS, width)), (torch.int64, (MAX_SPANS,)),
                (torch.int32, (MAX_SPANS,)), (torch.int32, (MAX_SPANS, width))]

    def fill(self, plan: StepPlan, block_size: int) -> None:
        """Writes a plan's spans. Rows behind them belong to no span and write no KV; spans behind them are empty, and
        final rows behind its own read one slot of block 0."""
        spans, tokens = plan.stages[0].spans, len(plan.token_ids)
        n, ends = len(spans.lengths), np.cumsum(spans.lengths)
        positions, slots = self.positions.numpy(), self.slot_mapping.numpy()
        positions[:, :tokens], positions[:, tokens:] = plan.positions, 0
        slots[:tokens], slots[tokens:] = span_slots(spans, block_size), -1
        bounds, k_lens = self.cu_seqlens_q.numpy(), self.seqlens_k.numpy()
        bounds[0], bounds[1:n + 1], bounds[n + 1:] = 0, ends, ends[-1]
        k_lens[:n], k_lens[n:] = spans.starts + spans.lengths, 1
        final, k = row_spans(spans, plan.logits_rows), len(plan.logits_rows)
        for view, values in ((self.block_tables, spans.block_tables), (self.final_tables, final.block_tables)):
            tables, (rows, width) = view.numpy(), values.shape
            tables[:rows, :width], tables[:rows, width:], tables[rows:] = values, 0, 0
        final_rows, final_lens = self.final_rows.numpy(), self.final_seqlens.numpy()
        final_rows[:k], final_rows[k:] = plan.logits_rows, 0
        final_lens[:k], final_lens[k:] = final.starts + 1, 1

    def spans(self, block_size: int) -> SpanBatch:
        """Spans whose lengths only the device knows: any of them may have all the tokens."""
        size, width = len(self.slot_mapping), self.block_tables.shape[1]
        return SpanBatch(cu_seqlens_q=self.cu_seqlens_q, seqlens_k=self.seqlens_k, block_tables=self.block_tables,
                         slot_mapping=self.slot_mapping, q_lens=(size,) * MAX_SPANS, k_lens=(), max_seqlen_q=size,
                         max_seqlen_k=width * block_size)

    def final(self, block_size: int) -> FinalRows:
        """As many as there can be, one query each."""
        bounds = torch.arange(MAX_SPANS + 1, dtype=torch.int32, device=self.final_rows.device)
        return FinalRows(self.final_rows, SpanBatch(
            cu_seqlens_q=bounds, seqlens_k=self.final_seqlens, block_tables=self.final_tables,
            slot_mapping=self.slot_mapping, q_lens=(1,) * MAX_SPANS, k_lens=(), max_seqlen_q=1,
            max_seqlen_k=self.final_tables.shape[1] * block_size))


@dataclass(frozen=True)
class CapturedSpans:
    graph: torch.cuda.CUDAGraph
    spans: SpanBatch        # whose tensors the graph reads
    final: FinalRows        # likewise
    hidden: Tensor          # [MAX_SPANS, hidden] of the final rows, overwritten by the next replay of any size


class SpanGraphs:
    """The layers over up to `MAX_SPANS` spans, captured for some numbers of tokens; a step takes the next larger one.

    Args: as of `DecodeGraphs`; sizes are numbers of tokens.
    """

    def __init__(self, model: CausalLM, kv_cache: Tensor, sizes: Sequence[int], num_axes: int, max_model_len: int,
                 memory: GraphMemory) -> None:
        self.model, self.kv_cache = model, kv_cache
        self.block_size = kv_cache.shape[3]
        self.layout = (num_axes, max_model_len // self.block_size + 1)
        self.sizes = sorted(sizes)
        self.staging = StagingBuffer(packed_bytes(SpanInputs.shapes(self.sizes[-1], *self.layout)), kv_cache.device)
        some_rows = model.embed(torch.zeros(1, dtype=torch.int64, device=kv_cache.device))
        self.embeddings = some_rows.new_zeros(self.sizes[-1], some_rows.shape[1])
        self.steps = {size: self._capture(size, memory) for size in reversed(self.sizes)}

    def fits(self, plan: StepPlan) -> bool:
        """Whether a captured step holds the plan: few enough tokens, spans and logits, all rows through all layers."""
        spans = plan.stages[0].spans
        return (len(plan.token_ids) <= self.sizes[-1] and len(plan.stages) == 1
                and max(len(spans.lengths), len(plan.logits_rows)) <= MAX_SPANS
                and spans.block_tables.shape[1] <= self.layout[1])

    def replay(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """Final hidden states of the plan's logits rows, [rows, hidden], from embeddings [tokens, hidden]; they stand
        until the next replay."""
        tokens = len(hidden)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        shapes = SpanInputs.shapes(size, *self.layout)
        SpanInputs(*packed_views(self.staging.next_host_bytes(), shapes)).fill(plan, self.block_size)
        self.staging.send(packed_bytes(shapes))
        self.embeddings[:tokens].copy_(hidden)
        step = self.steps[size]
        step.graph.replay()
        return step.hidden[:len(plan.logits_rows)]

    def close(self) -> None:
        """As of `DecodeGraphs`."""
        for step in self.steps.values():
            step.graph.reset()

    def _capture(self, size: int, memory: GraphMemory) -> CapturedSpans:
        inputs = SpanInputs(*packed_views(self.staging.device_bytes, SpanInputs.shapes(size, *self.layout)))
        inputs.positions.zero_()
        inputs.slot_mapping.fill_(-1)
        inputs.cu_seqlens_q.zero_()
        inputs.seqlens_k.fill_(1)
        inputs.block_tables.zero_()
        inputs.final_rows.zero_()
        inputs.final_seqlens.fill_(1)
        inputs.final_tables.zero_()
        spans, final = inputs.spans(self.block_size), inputs.final(self.block_size)
        stages = [LayerStage(0, None, spans)]
        embeddings = self.embeddings[:size]
        graph, hidden = memory.capture(lambda: self.model(embeddings, inputs.positions, self.kv_cache, stages, final))
        return CapturedSpans(graph, spans, final, hidden)
