"""Requests in, steps through scheduler and runner, finished outputs out."""
from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from nanovllm.config import Config
from nanovllm.engine.intake import ImageNames, build_sequence
from nanovllm.engine.interrupts import uninterrupted
from nanovllm.engine.model_runner import StepInFlight
from nanovllm.engine.planner import Planner
from nanovllm.engine.ranked_runner import start_runner
from nanovllm.engine.scheduled import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stop_strings import StopStrings
from nanovllm.outputs import RequestOutput
from nanovllm.plan import StepResult
from nanovllm.sampling_params import SamplingParams, parse_recompute_ratio


@dataclass(slots=True)
class Request:
    """What the engine keeps of a request beside its sequence."""

    seq: Sequence
    arrival: float                     # perf_counter() of the call that brought it
    hash_time: float = 0.0
    vit_time: float = 0.0
    ttft: float = 0.0
    logprobs: list[dict[int, float]] = field(default_factory=list)


class LLMEngine:
    """One model on one device.

    Not for several threads at once. After an error in a step the engine goes on: the step's requests are as before it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = Config(model, **options)
        model_config = self.config.model_config
        self.tokenizer = AutoTokenizer.from_pretrained(model_config.path)
        known = np.zeros(model_config.text.vocab_size, bool)
        ids = np.fromiter(self.tokenizer.get_vocab().values(), np.int64)
        known[ids[ids < len(known)]] = True
        self.image_names = ImageNames()
        self.requests: dict[int, Request] = {}
        self.watched: dict[int, StopStrings] = {}     # by seq_id
        # Of the tokenizer alone: an object that refers to itself is not freed, nor its device's memory, with its name.
        self._decode_one = cache(lambda token_id, decode=self.tokenizer.decode: str(
            decode([token_id], skip_special_tokens=True)))
        self.unclaimed: list[RequestOutput] = []      # ended while `generate` was waiting for others
        self.launched: deque[tuple[ScheduledStep, StepInFlight]] = deque()
        self.num_prompt_tokens = self.num_generated_tokens = 0       # computed since the engine was made
        self.runner = start_runner(self.config, known)
        self._close = weakref.finalize(self, self.runner.close)
        self.overlap = self.runner.device.type == "cuda" if self.config.overlap is None else self.config.overlap
        try:
            self.scheduler = Scheduler(self.config, self.runner.num_kvcache_blocks, self.runner.encoder_cache)
            self.planner = Planner(self.scheduler.rows, self.config.kvcache_block_size,
                                   self.runner.num_axes)
        except BaseException:
            self._close()       # now: whoever keeps the traceback keeps this object, and with it the device's memory
            raise

    # ------------------------------------------------------------ requests

    def add_request(self, prompt: Any, sampling_params: SamplingParams | None = None,
                    mm_inputs: Mapping[str, Any] | None = None) -> int:
        """Queues one prompt (a string or token ids) and returns its seq_id; see `LLM.generate` for the arguments.

        Raises ValueError for bad input, and then nothing is queued.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        request = self.build_request(prompt, params, mm_inputs, perf_counter())
        self.queue(request)
        return request.seq.seq_id

    def build_request(self, prompt: Any, params: SamplingParams, mm_inputs: Mapping[str, Any] | None,
                      arrival: float, may_guess: bool = False) -> Request:
        """A checked request that is not queued yet; may_guess: see `ImageNames.identify`."""
        self._check_open()
        self._check_params(params)
        seq = build_sequence(prompt, params, mm_inputs, self.config.model_config, self._tokenize)
        self.scheduler.check(seq)
        hash_time = self.image_names.identify(seq, may_guess)
        self.scheduler.check_images(seq)
        return Request(seq, arrival, hash_time)

    @uninterrupted()
    def queue(self, request: Request) -> None:
        self.scheduler.add(request.seq)
        self.requests[request.seq.seq_id] = request
        if stop := request.seq.sampling_params.stop:
            self.watched[request.seq.seq_id] = StopStrings(stop, self._decode, request.seq.sampling_params.min_tokens,
                                                           self._decode_one)

    @uninterrupted()
    def abort(self, seq_id: int) -> bool:
        """Ends a request; its output, with finish_reason "abort", comes from the next `step`. False if it is not
        there."""
        return self.scheduler.abort(seq_id)

    def is_finished(self) -> bool:
        """Whether no request is waiting, running, or finished but not yet handed out by `step`."""
        return not self.requests and not self.unclaimed

    # ------------------------------------------------------------ steps

    def step(self) -> list[RequestOutput]:
        """Hands the device its next step, takes in what it has done, and returns the outputs of the requests that
        ended, aborted ones too.

        With overlap, what is taken in is the step before: the host plans while the device computes.
        """
        self._check_open()
        try:
            with uninterrupted():
                seqs, _ = self.scheduler.schedule()
            if seqs:
                step = self.scheduler.in_flight[-1]
                self.launched.append((step, self.runner.launch(self.planner.plan(step))))
            busy = bool(self.launched)
            if busy and not (seqs and self.overlap and len(self.launched) == 1):
                self._take_in()
            if self.launched and self.scheduler.is_finished():
                self.abandon_steps()        # all that it computes lies behind the ends of its sequences
        except BaseException:
            self.abandon_steps()
            raise
        with uninterrupted():
            self.unclaimed += [self._output(seq) for seq in self.scheduler.take_finished()]
        outputs, self.unclaimed = self.unclaimed, []
        assert busy or outputs or self.scheduler.is_finished(), "requests wait, and none can run"
        return outputs

    @uninterrupted()
    def abandon_steps(self) -> None:
        """Drops the steps in flight and what they computed; their sequences stand as before them."""
        self.launched.clear()
        self.scheduler.abandon_steps()

    def _take_in(self) -> None:
        step, launched = self.launched.popleft()
        result = self.runner.collect(launched)
        others = [seq for seq in step.seqs if seq.guesses and not self._confirm(seq)]
        with uninterrupted():
            if others:
                self._restart(others)
            else:
                self._take_result(step, result)

    def _confirm(self, seq: Sequence) -> bool:
        start = perf_counter()
        right = self.image_names.confirm(seq)
        if seq.seq_id in self.requests:
            self.requests[seq.seq_id].hash_time += perf_counter() - start
        return right

    def _restart(self, seqs: list[Sequence]) -> None:
        """Drops what was computed with another image's KV, which nobody has seen; the sequences begin anew."""
        self.abandon_steps()
        for seq in seqs:
            if not seq.is_finished:         # by an abort; what its step encoded has the wrong key all the same
                assert seq.usage is not None
                self.scheduler.stats.count_admission(seq.usage, times=-1)
                seq.usage = None
                self.scheduler.requeue(seq)

    def _take_result(self, step: ScheduledStep, result: StepResult) -> None:
        ids = self._ids_of(step, result)
        if step.is_prefill:
            self.num_prompt_tokens += sum(max(0, min(stop, entry.seq.num_prompt_tokens) - start)
                                          for entry in step.entries for start, stop in entry.spans)
        self.num_generated_tokens += sum(entry.samples for entry in step.entries)
        self.scheduler.postprocess(step.seqs, ids)
        if self.watched:
            self._check_stop_strings(step)

    def _ids_of(self, step: ScheduledStep, result: StepResult) -> list[int]:
        """One id per sequence of the step, 0 where it sampled none; ends the requests whose logits were not finite."""
        now = perf_counter()
        for seq_id, seconds in result.encode_seconds.items():
            if seq_id in self.requests:
                self.requests[seq_id].vit_time += seconds
        sampled = [entry for entry in step.entries if entry.samples]
        for row, entry in enumerate(sampled):
            if entry.token_index == 0 and entry.seq.seq_id in self.requests:
                self.requests[entry.seq.seq_id].ttft = now - self.requests[entry.seq.seq_id].arrival
            logprobs = result.logprobs[row] if result.logprobs else None
            if logprobs is not None and not entry.seq.is_finished:      # one that ended gets no surplus token
                self.requests[entry.seq.seq_id].logprobs.append(logprobs)
        for row in np.flatnonzero(~result.finite).tolist():
            if not sampled[row].seq.is_finished:
                self.scheduler.fail(sampled[row].seq, "the model's logits are not finite (NaN or infinite): use "
                                                      "dtype=\"bfloat16\" or \"float32\", or check the weights")
        ids = iter(result.token_ids.tolist())
        return [next(ids) if entry.samples else 0 for entry in step.entries]

    def _check_stop_strings(self, step: ScheduledStep) -> None:
        for entry in step.entries:
            seq = entry.seq
            stops = self.watched.get(seq.seq_id)
            if stops is None or not entry.samples or seq.error:
                continue
            if stops.found(seq.completion_token_ids):
                if seq.is_finished:
                    seq.finish_reason = "stop"
                else:
                    self.scheduler.finish(seq, "stop")

    def _output(self, seq: Sequence) -> RequestOutput:
        request, stops = self.requests.pop(seq.seq_id), self.watched.pop(seq.seq_id, None)
        token_ids = seq.completion_token_ids
        stopped_by_id = seq.finish_reason == "stop" and token_ids[-1] in seq.stop_ids
        text = self._decode(token_ids[:-1] if stopped_by_id else token_ids)
        cut = stops.cut(text) if stops else None
        usage = seq.usage
        output = RequestOutput(
            seq_id=seq.seq_id, text=text if cut is None else cut, token_ids=token_ids,
            finish_reason=seq.finish_reason or "", ttft=request.ttft, hash_time=request.hash_time,
            vit_time=request.vit_time, num_prompt_tokens=seq.num_prompt_tokens,
            num_cached_tokens=usage.cached if usage else 0, num_reused_tokens=usage.reused if usage else 0,
            num_recomputed_image_tokens=usage.recomputed if usage else 0)
        if seq.sampling_params.logprobs is not None:
            output["logprobs"] = request.logprobs
        if seq.error is not None:
            output["error"] = seq.error
        return output

    # ------------------------------------------------------------ upkeep

    @uninterrupted()
    def reset_caches(self) -> None:
        """Forgets all cached prefixes, image KV and encoder rows; running requests keep what they hold."""
        self.scheduler.block_manager.reset()
        self.scheduler.encoder_cache.clear()

    def stats(self) -> dict[str, int]:
        """Counters since the engine was made (requests, tokens computed, cached and reused, hits, misses, evictions)
        and what the caches hold now."""
        manager, encoder = self.scheduler.block_manager, self.scheduler.encoder_cache
        return asdict(self.scheduler.stats) | dict(
            image_kv_evictions=manager.image_kv.num_evicted, image_kv_entries=manager.image_kv.num_entries,
            encoder_hits=encoder.num_hits, encoder_misses=encoder.num_misses, num_blocks=manager.num_blocks,
            blocks_in_use=sum(block.readers > 0 for block in manager.pool.blocks),
            blocks_cached=len(manager.pool.lru))

    def exit(self) -> None:
        """Gives the device memory back; the engine takes no more requests. Calling it again does nothing."""
        self._close()
        self.image_names.threads.shutdown()

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("this engine was closed by exit(): make a new LLM")
        if self.runner.parallel.rank:
            raise RuntimeError("only rank 0 takes requests; the other ranks call generate() when it does")

    # ------------------------------------------------------------ text

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def _decode(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}: {params!r:.80}")
        vocab, layers = self.config.model_config.text.vocab_size, self.config.model_config.text.num_layers
        if params.recompute_ratio is not None:
            parse_recompute_ratio(params.recompute_ratio, layers)
        outside = [i for i in params.stop_token_ids or () if not 0 <= i < vocab]
        if outside:
            raise ValueError(f"stop_token_ids {outside} are outside the vocabulary: 0 <= id < {vocab}")
