"""One rank of an engine: loads the model, sizes its caches, and carries out one StepPlan after the other."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine.encoder_cache_manager import EncoderCacheManager
from nanovllm.layers.sampler import Sampler, SamplerOutput, logprob_dicts
from nanovllm.models.registry import build_model
from nanovllm.models.weights import init_dummy_weights, load_weights
from nanovllm.parallel import ALONE, TensorParallel
from nanovllm.plan import StepPlan, StepResult
from nanovllm.runner.cuda_graph import DecodeGraphs, GraphCost, GraphMemory, graph_sizes
from nanovllm.runner.image_encoder import EncodedImages, EncodesImages, encode_images, encode_spread_images
from nanovllm.runner.inputs import final_rows, host_tensor, layer_stages, samples_plainly, sampling_inputs
from nanovllm.runner.kv_cache import (
    GIB,
    CacheSizes,
    allocate_kv_cache,
    free,
    kv_block_bytes,
    move_kv,
    sizes_of_budget,
    sizes_of_kv_bytes,
)
from nanovllm.runner.span_graph import SpanGraphs, bucket_sizes
from nanovllm.runner.staging import to_device
from nanovllm.runner.warm_up import (
    cache_budget,
    graph_bytes,
    largest_picture,
    largest_step,
    max_patches_a_call,
    num_position_axes,
    num_warm_up_blocks,
)

logger = logging.getLogger(__name__)

DUMMY_SEED = 0


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device is working on; what it will answer, in host memory once `done`."""

    sampled: SamplerOutput | None           # None: the step has no logits, or another rank samples
    encoded: EncodedImages
    done: torch.cuda.Event | None           # None on the CPU, where a launched step is a finished one


class ModelRunner:
    """Model, caches and sampler on one device: all of the model, or the share of one rank.

    Every rank carries out the same plans; rank 0 samples.

    Args:
        config: the engine's options.
        known_vocab: bool [vocab_size], the ids that may be sampled; None: all.
        parallel: which rank this is.
        device: where it computes; None: the device of the options.

    Raises ValueError with the numbers if the memory that the options leave holds no KV block, and what
    `models.weights.load_weights` raises.
    """

    def __init__(self, config: Config, known_vocab: NDArray[np.bool_] | None = None,
                 parallel: TensorParallel = ALONE, device: torch.device | None = None) -> None:
        self.config = config
        self.device = pick_device(config.device) if device is None else device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        with on_device(self.device):
            self._build(known_vocab, parallel)

    def _build(self, known_vocab: NDArray[np.bool_] | None, parallel: TensorParallel) -> None:
        config = self.config
        allocated_before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        self.backend = select_backend(config.attention_backend, self.device, self.dtype)
        fused = self.backend.fused
        parallel = self.parallel = parallel if fused is None else parallel.with_small_sums(fused.sum_ranks)
        self.model = build_model(config.model_config, self.backend, self.dtype, self.device, parallel)
        if config.load_format == "dummy":
            init_dummy_weights(self.model, DUMMY_SEED)
        else:
            load_weights(self.model, config.model)
        text = config.model_config.text
        text = replace(text, num_kv_heads=parallel.num_kv_heads(text.num_kv_heads))
        self.cache_config = replace(config.model_config, text=text)         # of this rank's share of the KV cache
        self.sampler = Sampler(text.vocab_size, config.max_num_seqs, known_vocab, self.device, self.backend.fused)
        # By batch row; one more for the rows that fill up a captured step.
        self.last_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self.inv_freq = self.model.model.rotary_emb.inv_freq.cpu()     # for moved keys, whose angle the host computes
        self.num_axes = num_position_axes(config)
        self.max_patches_a_call = max_patches_a_call(config)
        self.decode_graphs: DecodeGraphs | None = None
        self.span_graphs: SpanGraphs | None = None
        self.graph_cost: GraphCost | None = None        # None: no graphs
        sizes = self._size_caches(allocated_before)
        self.num_kvcache_blocks, self.encoder_num_blocks = parallel.smallest(
            [sizes.num_kvcache_blocks, sizes.encoder_num_blocks], self.device)
        block_size = config.kvcache_block_size
        self.kv_cache = allocate_kv_cache(text, self.num_kvcache_blocks, block_size, self.dtype, self.device)
        self.encoder_cache = EncoderCacheManager(self.encoder_num_blocks, block_size, text.hidden_size, self.dtype,
                                                 self.device)
        if self.device.type == "cuda" and self.backend.fused is not None and not config.enforce_eager:
            self._capture_graphs()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out one step and waits for its result."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepInFlight:
        """Queues the work of one step on the device; on a GPU it is still to be done when this returns.

        The next step may be launched before this one is collected: `StepPlan.fed` takes its ids from the device.
        """
        with on_device(self.device):
            sampled, encoded = self._compute(plan, self.kv_cache)
            if self.device.type == "cpu":
                return StepInFlight(sampled, encoded, None)
            done = torch.cuda.Event()
            sampled = None if sampled is None else sampled.to_host()
            done.record()
            return StepInFlight(sampled, encoded, done)

    def collect(self, step: StepInFlight) -> StepResult:
        """Waits until the device has done a launched step, and returns its result."""
        if step.done is not None:
            step.done.synchronize()
        encode_seconds = step.encoded.seconds_by_seq()
        if step.sampled is None:
            return StepResult(np.empty(0, np.int64), np.empty(0, np.bool_), None, encode_seconds)
        token_ids: NDArray[np.int64] = step.sampled.token_ids.numpy()
        logprobs = step.sampled.logprobs
        return StepResult(token_ids, step.sampled.finite.numpy(),
                          None if logprobs is None else logprob_dicts(logprobs, token_ids.tolist()), encode_seconds)

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Around a call that every launched rank makes; True where it has requests to run."""
        yield True

    def close(self) -> None:
        """Gives the device memory back, whoever still refers to it; the runner carries out no step any more."""
        for graphs in (self.decode_graphs, self.span_graphs):
            if graphs is not None:
                graphs.close()
        # The traceback of an error that someone keeps has frames, and these have tensors.
        for tensor in (self.kv_cache, self.encoder_cache.rows, *self.model.parameters(), *self.model.buffers()):
            free(tensor)
        self.encoder_cache.release_rows()
        del self.model, self.kv_cache, self.sampler, self.last_ids, self.inv_freq, self.decode_graphs, self.span_graphs
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ parts of a step

    def _compute(self, plan: StepPlan, kv_cache: Tensor) -> tuple[SamplerOutput | None, EncodedImages]:
        """KV copies, images, the spans through the layers, one id for each of the logits rows."""
        if plan.copies:
            move_kv(kv_cache, plan.copies, self.inv_freq, self.backend.fused)
        if self.decode_graphs is not None and self.decode_graphs.fits(plan):
            logits, sampled = self.decode_graphs.replay(plan)
            plain = samples_plainly(plan.sampling, logits.shape[1])
            return (sampled if plain else self._sample(plan, logits)), EncodedImages()
        encoded, uncached = self._encode(plan)
        token_ids, fed = to_device((host_tensor(plan.token_ids), host_tensor(plan.fed)), self.device)
        if plan.fed.shape[1]:
            tokens, seq_rows = fed
            token_ids[tokens] = self.parallel.broadcast(self.last_ids[seq_rows])
        hidden = self.model.embed(token_ids)            # [tokens, hidden]
        for rows in plan.image_rows:
            image = (uncached[rows.key][rows.first:rows.stop] if rows.block_ids is None
                     else self.encoder_cache.read(rows.block_ids, rows.stop, rows.first))
            hidden[rows.target:rows.target + len(image)] = image
        if self.span_graphs is not None and self.span_graphs.fits(plan):
            hidden = self.span_graphs.replay(plan, hidden)
        else:
            block_size = self.config.kvcache_block_size
            positions, stages, final = to_device(
                (host_tensor(plan.positions), layer_stages(plan.stages, block_size), final_rows(plan, block_size)),
                self.device)
            hidden = self.model(hidden, positions, kv_cache, stages, final)
        if not len(plan.logits_rows):
            return None, encoded
        return self._sample(plan, self.model.compute_logits(hidden)), encoded

    def _encode(self, plan: StepPlan) -> tuple[EncodedImages, dict[object, Tensor]]:
        """Encodes the plan's images: rows with blocks go to the encoder cache, the others are returned by key."""
        if not plan.encodes:
            return EncodedImages(), {}
        model = cast(EncodesImages, self.model)
        if self.parallel.spread_images:
            vision = self.config.model_config.vision
            assert vision is not None, "a text model takes no pictures"
            encoded = encode_spread_images(model, plan.encodes, self.max_patches_a_call, vision.spatial_merge_size,
                                           self.encoder_cache.rows, self.parallel)
        else:
            encoded = encode_images(model, plan.encodes, self.max_patches_a_call, self.device, self.parallel)
        # All ranks go by the table of rank 0, and by no other.
        write = self.encoder_cache.store if self.parallel.rank else self.encoder_cache.write
        uncached: dict[object, Tensor] = {}
        for encode, rows in zip(plan.encodes, encoded.rows):
            if encode.block_ids is None:
                uncached[encode.key] = rows
            else:
                write(encode.block_ids, rows)
        encoded.rows.clear()        # a step in flight holds no rows that are in the cache
        return encoded, uncached

    def _sample(self, plan: StepPlan, logits: Tensor) -> SamplerOutput | None:
        if self.parallel.rank:
            return None
        logits = logits.to(torch.float32, copy=True)        # the sampler overwrites them
        inputs, seq_rows = to_device((sampling_inputs(plan.sampling, plan.penalty_resets, logits.shape[1]),
                                      host_tensor(plan.sampling.seq_rows)), self.device)
        sampled = self.sampler(logits, inputs)
        self.last_ids[seq_rows] = sampled.token_ids
        return sampled

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        start, config = perf_counter(), self.config
        torch.cuda.empty_cache()        # capturing does so, too
        before = torch.cuda.memory_reserved(self.device)
        memory = GraphMemory(self.device)
        self.decode_graphs = DecodeGraphs(self.model, self.sampler, self.kv_cache, self.last_ids,
                                          graph_sizes(config.max_num_seqs), self.num_axes, config.max_model_len, memory,
                                          self.parallel)
        buckets = bucket_sizes(config.max_num_batched_tokens)
        if buckets:
            self.span_graphs = SpanGraphs(self.model, self.kv_cache, buckets, self.num_axes, config.max_model_len,
                                          memory)
        self.graph_cost = GraphCost(len(self.decode_graphs.sizes) + len(buckets), perf_counter() - start,
                                    torch.cuda.memory_reserved(self.device) - before)
        logger.info("%s", self.graph_cost)

    # ------------------------------------------------------------ memory

    def _size_caches(self, allocated_before: int) -> CacheSizes:
        """The given number of blocks, or what kvcache_memory_gb (CPU) or the card's memory holds."""
        config = self.config
        rest = self.cache_config, config.kvcache_block_size, self.dtype, config.encoder_cache_ratio
        if config.num_kvcache_blocks > 0:
            block_bytes = kv_block_bytes(self.cache_config.text, config.kvcache_block_size, self.dtype)
            return sizes_of_kv_bytes(config.num_kvcache_blocks * block_bytes, *rest)
        if self.device.type == "cpu":
            return sizes_of_kv_bytes(int(config.kvcache_memory_gb * GIB), *rest)
        # The first time compiles kernels, and libraries allocate what no later step needs.
        first = partial(self._warm_up, logprobs=False)
        if self.backend.fused is not None and self.parallel.size == 1:      # see `DecodeGraphs`
            self.backend.fused.compile_ahead(first)
        else:
            first()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._warm_up()
        graphs = graph_bytes(config, self.dtype.itemsize)
        return sizes_of_budget(cache_budget(config, self.device, allocated_before, graphs), *rest)

    @torch.inference_mode()
    def _warm_up(self, logprobs: bool = True) -> None:
        """Runs the largest picture and the largest step that the options allow, over a KV cache made for it."""
        config = self.config
        if (vision := config.model_config.vision) is not None:
            t, h, w = largest_picture(config)
            patches = torch.randn(t * h * w, vision.patch_dim, device=self.device)
            cast(EncodesImages, self.model).encode_images(patches, [(t, h, w)])
            del patches
        kv_cache = allocate_kv_cache(self.cache_config.text, num_warm_up_blocks(config),
                                     config.kvcache_block_size, self.dtype, self.device)
        self._compute(largest_step(config, logprobs), kv_cache)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """For work on a device that may not be the current one: kernels and events go where that is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pick_device(name: str | None) -> torch.device:
    """The device "cuda" or "cpu"; None: cuda where there is one. Raises ValueError for cuda where there is none."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError('device="cuda", but torch finds no CUDA device; give device="cpu", or check the driver and '
                         "CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", torch.cuda.current_device())
