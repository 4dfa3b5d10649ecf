"""The door of the library: load a model, generate for prompts with or without images, close."""
from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.intake import split_prompts
from nanovllm.engine.interrupts import uninterrupted
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import RequestOutput


class LLM(LLMEngine):
    """A model, ready to generate.

    `model` is a local folder or a hub id; `options` are those of `nanovllm.config.Config`. Several can live in one
    process. Device memory comes back on `exit()`, at the end of a `with` block, or when nobody refers to it any more.
    """

    def generate(self, prompts: Any, sampling_params: Any = None, mm_inputs: Any = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Generates for one prompt or many, and returns one output for each, in their order.

        prompts: a string, a flat list of token ids, or a list of those. In a string, one image placeholder stands for
        each image; token ids hold one placeholder per image token, as the Hugging Face processor writes them.
        sampling_params: one `SamplingParams` for all (default: `SamplingParams()`), or one for each prompt.
        mm_inputs: for each prompt None or a dict with what the processor returns: pixel_values [patches, patch_dim],
        image_grid_thw [images, 3], and for video pixel_values_videos, video_grid_thw, second_per_grid_ts.

        Raises ValueError for the first bad request before any is run. After any other exception, KeyboardInterrupt
        included, the call's requests are gone, their blocks are free, and the engine can be used on; after RankError
        (with tensor_parallel_size above 1) it cannot. Of ranks that torchrun started, each makes the call, and all but
        rank 0 return no outputs.
        """
        with self.runner.call() as has_requests:
            return self._generate(prompts, sampling_params, mm_inputs, use_tqdm) if has_requests else []

    def _generate(self, prompts: Any, sampling_params: Any, mm_inputs: Any, use_tqdm: bool) -> list[RequestOutput]:
        arrival = perf_counter()
        requests = [self.build_request(*request, arrival, may_guess=True)      # the caller waits, and changes no pixels
                    for request in split_prompts(prompts, sampling_params, mm_inputs)]
        mine = [request.seq.seq_id for request in requests]
        wanted = set(mine)
        outputs: dict[int, RequestOutput] = {}
        others: list[RequestOutput] = []
        try:
            for request in requests:
                self.queue(request)
            with _Progress(self, len(requests), disable=not use_tqdm) as progress:
                while len(outputs) < len(mine):
                    for output in self.step():
                        if output["seq_id"] in wanted:
                            outputs[output["seq_id"]] = output
                        else:
                            others.append(output)
                    progress.update(len(outputs))
        except BaseException:
            with uninterrupted():
                self.abandon_steps()
                self._drop(mine)
            raise
        finally:
            self.unclaimed += others
        return [outputs[seq_id] for seq_id in mine]

    def _drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.abort(seq_id)
            self.requests.pop(seq_id, None)
            self.watched.pop(seq_id, None)
        self.unclaimed = [output for output in self.unclaimed if output["seq_id"] not in seq_ids]
        self.scheduler.finished = [seq for seq in self.scheduler.finished if seq.seq_id not in seq_ids]

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()


class _Progress:
    """A bar over requests that shows prompt and generated tokens per second."""

    def __init__(self, engine: LLMEngine, total: int, disable: bool) -> None:
        self.bar = tqdm(total=total, desc="Generating", disable=disable, dynamic_ncols=True)
        self.engine = engine
        self.start = perf_counter()
        self.before = engine.num_prompt_tokens, engine.num_generated_tokens

    def update(self, num_finished: int) -> None:
        if self.bar.disable:
            return
        seconds = perf_counter() - self.start
        prompt, generated = (now - before for now, before in zip(
            (self.engine.num_prompt_tokens, self.engine.num_generated_tokens), self.before))
        self.bar.set_postfix_str(f"prefill {prompt / seconds:.0f} tok/s, decode {generated / seconds:.0f} tok/s",
                                 refresh=False)
        self.bar.update(num_finished - self.bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
