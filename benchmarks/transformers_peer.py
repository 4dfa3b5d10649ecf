"""The same work through the batched generate of transformers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.generation import TEMPERATURE, Work
from benchmarks.models import ModelFolder
from benchmarks.report import Result


class TransformersPeer:
    """A model as transformers runs it: prompts padded on the left, every row generated to the longest output."""

    name = "transformers"

    def __init__(self, folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(folder.path)
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        if folder.weights == "dummy":
            with device:
                self.model = auto.from_config(config, dtype=dtype)
        else:
            self.model = auto.from_pretrained(folder.path, dtype=dtype).to(device)
        self.model.eval()
        self.model.generation_config.eos_token_id = None        # generate to the given length
        self.device = device

    def measure(self, todo: Sequence[tuple[int | None, Work]], mode: str) -> list[Result]:
        """Counts the tokens that the work asks for, not those that rows are padded with."""
        return [self._measure(work, mode, seed) for seed, work in todo]

    def _measure(self, work: Work, mode: str, seed: int | None) -> Result:
        longest = max(map(len, work.prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts])
        self._generate(ids, mask, 2)
        seconds = self._generate(ids, mask, max(work.output_lens))
        return Result(mode, self.name, len(work.prompts), seconds, seed=seed,
                      output_tok_per_s=work.num_output_tokens / seconds, call_ms=1e3 * seconds)

    def measure_image(self, prompt: list[int], mm_inputs: Mapping[str, Any], mode: str, repeats: int) -> Result:
        """One token for a prompt with pictures."""
        ids = torch.tensor([prompt])
        images = {key: torch.as_tensor(value) for key, value in mm_inputs.items()}
        is_image = ids == self.model.config.image_token_id
        images["mm_token_type_ids"] = is_image.int()
        seconds = [self._generate(ids, torch.ones_like(ids), 1, **images) for _ in range(repeats + 1)][1:]
        return Result(mode, self.name, 1, sum(seconds), call_ms=1e3 * median(seconds))

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, num_new: int, **images: torch.Tensor) -> float:
        """Seconds of one call, the way to the device and back included."""
        start = perf_counter()
        inputs = {name: tensor.to(self.device) for name, tensor in images.items()}
        output = self.model.generate(
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), max_new_tokens=num_new, do_sample=True,
            temperature=TEMPERATURE, top_k=0, pad_token_id=0, **inputs).cpu()
        assert output.shape[1] == ids.shape[1] + num_new
        return perf_counter() - start
