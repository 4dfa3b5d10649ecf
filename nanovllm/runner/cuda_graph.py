"""Decode steps as CUDA graphs: one launch in place of hundreds, for every batch size up to max_num_seqs."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.contract import SpanBatch
from nanovllm.layers.sampler import Sampler, SamplerOutput
from nanovllm.models.decoder import CausalLM
from nanovllm.models.layer_stage import LayerStage
from nanovllm.parallel import ALONE, TensorParallel
from nanovllm.plan import StepPlan
from nanovllm.runner.inputs import span_slots, stream_keys
from nanovllm.runner.kv_cache import free
from nanovllm.runner.staging import Shape, StagingBuffer, packed_bytes, packed_views

T = TypeVar("T")


class GraphMemory:
    """The memory that all graphs of a device share: one pool, and one stream, since memory is kept by stream.

    torch would capture every graph of a process on a stream of the device that was current at the first capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of what `run` launches, and what it returns, which each replay overwrites."""
        run()           # compiles what is not compiled yet, makes the libraries allocate what they keep
        graph = torch.cuda.CUDAGraph()
        # What other threads of the program do on a device meanwhile is no error.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            return graph, run()


@dataclass(frozen=True)
class GraphCost:
    """What capturing an engine's graphs took."""

    num_graphs: int
    seconds: float
    num_bytes: int      # of the card, more than before

    def __str__(self) -> str:
        return f"{self.num_graphs} CUDA graphs: {self.seconds:.1f} s, {self.num_bytes / 2**20:.0f} MiB"


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own; `max_num_seqs` always is one, so that no batch is too large for all."""
    sizes = {1, 2, 4, *range(8, min(max_num_seqs, 256), 8), *range(256, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


@dataclass(frozen=True)
class DecodeInputs:
    """What one graph reads, on the device, or the same arrays on the host where they are filled."""

    token_ids: Tensor       # int64 [size]
    fed: Tensor             # int64 [size] batch row whose last id takes the place of token_ids; -1: none
    positions: Tensor       # int64 [axes, size]
    slot_mapping: Tensor    # int64 [size]
    seqlens_k: Tensor       # int32 [size]
    block_tables: Tensor    # int32 [size, width]
    seq_rows: Tensor        # int64 [size] batch row that the sampled id is remembered for
    temperature: Tensor     # float32 [size, 1]
    keys: Tensor            # int32 [2, size, 1] of the random streams
    greedy: Tensor          # int32 [size] 1: the argmax is taken

    @staticmethod
    def shapes(size: int, num_axes: int, width: int) -> list[Shape]:
        """dtype and shape of each array, in the order of the fields."""
        return [(torch.int64, (size,)), (torch.int64, (size,)), (torch.int64, (num_axes, size)), (torch.int64, (size,)),
                (torch.int32, (size,)), (torch.int32, (size, width)), (torch.int64, (size,)),
                (torch.float32, (size, 1)), (torch.int32, (2, size, 1)), (torch.int32, (size,))]

    def fill(self, plan: StepPlan, block_size: int, spare_row: int) -> None:
        """Writes a plan's decodes. A row behind them writes no KV, what it reads is one slot of block 0, and what it
        samples goes to the batch row `spare_row`, which no sequence has."""
        spans, batch, n = plan.stages[0].spans, plan.sampling, len(plan.token_ids)
        fed = np.full(n, -1)
        fed[plan.fed[0]] = plan.fed[1]
        for view, values, harmless in (
                (self.token_ids, plan.token_ids, 0), (self.fed, fed, -1), (self.positions, plan.positions, 0),
                (self.slot_mapping, span_slots(spans, block_size), -1), (self.seqlens_k, spans.starts + 1, 1),
                (self.seq_rows, batch.seq_rows, spare_row), (self.temperature[:, 0], batch.temperature, 1),
                (self.keys[:, :, 0], stream_keys(batch.seed, batch.token_index)[:, :, 0], 0),
                (self.greedy, batch.top_k == 1, 1)):
            into, known = view.numpy(), np.shape(values)[-1]        # a rank that does not sample is not told how to
            into[..., :known], into[..., known:] = values, harmless
        tables, width = self.block_tables.numpy(), spans.block_tables.shape[1]
        tables[:n, :width], tables[:n, width:], tables[n:] = spans.block_tables, 0, 0

    def spans(self, block_size: int) -> SpanBatch:
        """One query each; the longest KV range is what a whole block table holds, whatever the sequences' lengths."""
        size, width = self.block_tables.shape
        device = self.block_tables.device
        return SpanBatch(cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
                         seqlens_k=self.seqlens_k, block_tables=self.block_tables, slot_mapping=self.slot_mapping,
                         q_lens=(1,) * size, k_lens=(), max_seqlen_q=1, max_seqlen_k=width * block_size)


@dataclass(frozen=True)
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    spans: SpanBatch        # whose tensors the graph reads
    sampled: SamplerOutput | None       # of plain sampling; None on a rank that does not sample


class DecodeGraphs:
    """Decode steps captured for a list of batch sizes; a batch takes the next larger one.

    Args:
        model, sampler: what is captured, from token ids to token ids.
        kv_cache: the pool `[layers, 2, blocks, block_size, kv_heads, head_dim]`, at this address for good.
        last_ids: int64 `[batch rows + 1]`, the last id that each row sampled, and a row for what is not wanted.
        sizes: batch sizes.
        num_axes: of positions.
        max_model_len: tokens of a sequence; block tables are wide enough for one more.
        memory: that all graphs share.
        parallel: the ranks that capture and replay together; rank 0 alone has last ids and logits.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, kv_cache: Tensor, last_ids: Tensor, sizes: Sequence[int],
                 num_axes: int, max_model_len: int, memory: GraphMemory, parallel: TensorParallel = ALONE) -> None:
        self.parallel = parallel
        self.model, self.sampler, self.kv_cache, self.last_ids = model, sampler, kv_cache, last_ids
        self.block_size = kv_cache.shape[3]
        self.layout = (num_axes, max_model_len // self.block_size + 1)
        self.sizes = sorted(sizes)
        num_bytes = packed_bytes(DecodeInputs.shapes(self.sizes[-1], *self.layout))
        self.staging = StagingBuffer(num_bytes, kv_cache.device)
        # Of every size, since each graph would keep its own: what is captured and still held keeps its memory.
        self.logits = model.head.weight.new_empty(self.sizes[-1], model.head.padded_vocab_size)
        if sampler.fused is not None and parallel.size == 1:    # else a rank may wait for a sum that another leaves out
            sampler.fused.compile_ahead(self._rehearse)
        # The largest first: the smaller ones then find room in its memory.
        self.steps = {size: self._capture(size, memory) for size in reversed(self.sizes)}

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan is a decode batch of a captured size: a token each, all of them sampled, no images."""
        spans = plan.stages[0].spans
        return (len(plan.token_ids) <= self.sizes[-1] and len(plan.logits_rows) == len(plan.token_ids)
                and len(plan.stages) == 1 and spans.block_tables.shape[1] <= self.layout[1] and not plan.image_rows)

    def replay(self, plan: StepPlan) -> tuple[Tensor, SamplerOutput | None]:
        """Logits [tokens, vocab_size] of a plan that fits, in the model's dtype, and what plain sampling makes of them;
        both stand until the next replay. A rank that does not sample has no logits: any numbers, and None."""
        size = self.sizes[bisect_left(self.sizes, len(plan.token_ids))]
        shapes = DecodeInputs.shapes(size, *self.layout)
        host = DecodeInputs(*packed_views(self.staging.next_host_bytes(), shapes))
        host.fill(plan, self.block_size, spare_row=len(self.last_ids) - 1)
        self.staging.send(packed_bytes(shapes))
        step, n = self.steps[size], len(plan.token_ids)
        step.graph.replay()
        logits = self.logits[:n, :self.model.head.vocab_size]
        if (sampled := step.sampled) is None:
            return logits, None
        return logits, SamplerOutput(sampled.token_ids[:n], sampled.finite[:n], None)

    def close(self) -> None:
        """Gives the graphs back, whoever still refers to them."""
        for step in self.steps.values():
            step.graph.reset()
        free(self.logits)

    def _rehearse(self) -> None:
        """Launches the kernels that graphs hold; what they are compiled for changes at powers of two, if at all."""
        for size in self.sizes:
            if size & (size - 1) == 0 or size == self.sizes[-1]:
                inputs = self._harmless_inputs(size)
                self._decode(inputs, inputs.spans(self.block_size))

    def _capture(self, size: int, memory: GraphMemory) -> CapturedStep:
        inputs = self._harmless_inputs(size)
        spans = inputs.spans(self.block_size)
        graph, sampled = memory.capture(lambda: self._decode(inputs, spans))
        return CapturedStep(graph, spans, sampled)

    def _harmless_inputs(self, size: int) -> DecodeInputs:
        """Inputs of rows that write nowhere."""
        inputs = DecodeInputs(*packed_views(self.staging.device_bytes, DecodeInputs.shapes(size, *self.layout)))
        inputs.token_ids.zero_()
        inputs.fed.fill_(-1)
        inputs.positions.zero_()
        inputs.slot_mapping.fill_(-1)
        inputs.seqlens_k.fill_(1)
        inputs.block_tables.zero_()
        inputs.seq_rows.fill_(len(self.last_ids) - 1)
        inputs.temperature.fill_(1)
        inputs.keys.zero_()
        inputs.greedy.fill_(1)
        return inputs

    def _decode(self, inputs: DecodeInputs, spans: SpanBatch) -> SamplerOutput | None:
        """Plain samples on rank 0, of what `logits` holds then; what depends on a batch's numbers is read from
        `inputs`."""
        hidden = self._embed(inputs)
        hidden = self.model(hidden, inputs.positions, self.kv_cache, [LayerStage(0, None, spans)])
        logits = self.model.compute_logits(hidden, self.logits[:len(hidden)])
        if self.parallel.rank:
            return None
        token_ids, finite = self.sampler.draw_plainly(logits, inputs.temperature, inputs.keys, inputs.greedy)
        self.last_ids.index_copy_(0, inputs.seq_rows, token_ids)
        return SamplerOutput(token_ids, finite, None)

    def _embed(self, inputs: DecodeInputs) -> Tensor:
        fused, ids = self.sampler.fused, (inputs.token_ids, inputs.fed, self.last_ids)
        if fused is not None and self.parallel.size == 1:
            return fused.embed(*ids, self.model.model.embed_tokens.weight)
        return self.model.embed(fed_ids(*ids, self.parallel))


def fed_ids(token_ids: Tensor, fed: Tensor, last_ids: Tensor, parallel: TensorParallel = ALONE) -> Tensor:
    """int64 [tokens]: `last_ids` of rank 0 at `fed`, and `token_ids` where that is -1."""
    return torch.where(fed < 0, token_ids, parallel.broadcast(last_ids[fed.clamp(min=0)]))
