"""Asks every question in full and with reused pictures, and says how far the answers are apart."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm import LLM, SamplingParams
from nanovllm.quality.prompts import Inputs, Prompts
from nanovllm.quality.questions import Question

Ratio = float | Sequence[float]
ONE_ROW = 1e-6                  # of any picture's rows: rounded up, one


@dataclass(frozen=True)
class Reply:
    """What one request gave."""

    token_ids: list[int]
    text: str
    first: NDArray[np.float64]      # [vocab]: log-probabilities of the first token
    ttft: float                     # seconds
    image_tokens: int
    reused_tokens: int              # of them, in the first layer


@dataclass(frozen=True)
class Outcome:
    """One question at one ratio, against full prefill."""

    kind: str
    setting: int                    # index into what was asked for; -1: full prefill itself
    right: bool | None              # None: no answer was given with the question
    first_equal: bool
    all_equal: bool
    kl: float                       # of the first token's distribution from full prefill's, in nats
    image_tokens: int
    computed_tokens: int            # of them, in the first layer
    ttft: float                     # seconds


class Examiner:
    """One engine without prefix cache, so that all there is to reuse is image KV."""

    def __init__(self, llm: LLM, max_tokens: int = 16, first_seen: str = "elsewhere") -> None:
        config = llm.config.model_config
        self.llm, self.max_tokens, self.first_seen = llm, max_tokens, first_seen
        self.prompts = Prompts(config.path, config.vision_start_token_id, config.image_token_id,
                               config.vision_end_token_id)

    def outcomes(self, question: Question, ratios: Sequence[Ratio]) -> Iterator[Outcome]:
        """Full prefill in a fresh context first; then each ratio, the pictures having been seen elsewhere."""
        asking = self.prompts.asking(question)
        self.llm.reset_caches()
        full = self._reply(asking, 0.0)
        yield self._outcome(question, -1, full, full)
        self.llm.reset_caches()
        self._generate(self.prompts.showing(question, self.first_seen), 1, recompute_ratio=0.0)
        for setting, ratio in enumerate(ratios):
            yield self._outcome(question, setting, self._reply(asking, ratio), full)

    def _reply(self, asking: Inputs, ratio: Ratio) -> Reply:
        """Asked twice: for the distribution, which also compiles what a step needs, then for answer and time."""
        first = self._generate(asking, 1, recompute_ratio=ratio, logprobs=-1)["logprobs"][0]
        if ratio == 0.0:
            self.llm.reset_caches()         # the tower is part of a cold request
        output = self._generate(asking, self.max_tokens, recompute_ratio=ratio)
        image_id = self.llm.config.model_config.image_token_id
        return Reply(output["token_ids"], output["text"], np.array([first[token] for token in range(len(first))]),
                     output["ttft"], int((asking["input_ids"] == image_id).sum()), output["num_reused_tokens"])

    def _generate(self, inputs: Inputs, max_tokens: int, **options: Any) -> Any:
        params = SamplingParams(max_tokens=max_tokens, top_k=1, **options)
        return self.llm.generate(inputs["input_ids"].tolist(), params, [inputs], use_tqdm=False)[0]

    @staticmethod
    def _outcome(question: Question, setting: int, reply: Reply, full: Reply) -> Outcome:
        return Outcome(
            question.kind, setting, None if question.answer is None else is_right(reply.text, question.answer),
            first_equal=reply.token_ids[:1] == full.token_ids[:1], all_equal=reply.token_ids == full.token_ids,
            kl=kl_divergence(full.first, reply.first), image_tokens=reply.image_tokens,
            computed_tokens=reply.image_tokens - reply.reused_tokens, ttft=reply.ttft)


def measure(examiner: Examiner, questions: Iterable[Question], ratios: Sequence[Ratio],
            done: Callable[[], object]) -> list[Outcome]:
    """Every question at every ratio; calls `done` behind each question."""
    outcomes: list[Outcome] = []
    for question in questions:
        outcomes += examiner.outcomes(question, ratios)
        done()
    return outcomes


def is_right(text: str, answer: str) -> bool:
    """Whether the text begins with the answer, word by word, whatever case and punctuation."""
    words, wanted = (re.findall(r"\w+", each.casefold()) for each in (text, answer))
    return words[:len(wanted)] == wanted


def kl_divergence(reference: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Sum of p * (log p - log q) over the vocabulary; both [vocab] log-probabilities."""
    possible = np.exp(reference) > 0
    p, q = reference[possible], other[possible]
    return max(0.0, float((np.exp(p) * (p - q)).sum()))
