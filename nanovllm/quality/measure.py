"""Asks every question in full and with reused pictures, and says how far the answers are apart."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm import LLM, SamplingParams
from nanovllm.quality.prompts import Inputs, Prompts
from nanovllm.quality.questions import Question, words_of

Ratio = float | Sequence[float]
ONE_ROW = 1e-6                  # of any picture's rows: rounded up, one

# Bounds of a batch: questions, and first-token distributions in numbers held on the host (some 100 bytes each).
MAX_QUESTIONS, MAX_LOGPROBS = 32, 1 << 22
TIMED_PER_KIND = 10             # questions of each kind whose time to the first token is measured, alone


@dataclass(frozen=True)
class Posed:
    """A question with the prompt that asks it and the one in which its pictures are first seen."""

    question: Question
    asking: Inputs
    showing: Inputs
    timed: bool


@dataclass(frozen=True)
class Reply:
    """What one request gave."""

    token_ids: list[int]
    text: str
    first: NDArray[np.float64]      # [vocab]: log-probabilities of the first token
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
    ttft: float | None              # seconds, asked alone; None: not measured


class Examiner:
    """One engine without prefix cache, so that all there is to reuse is image KV."""

    def __init__(self, llm: LLM, max_tokens: int = 16, first_seen: str = "elsewhere", seed: int = 0) -> None:
        self.llm, self.max_tokens, self.first_seen = llm, max_tokens, first_seen
        self.rng = random.Random(f"first seen {seed}")
        self.prompts = Prompts(llm.config.model_config)

    def batches(self, questions: Iterable[Question], timed_per_kind: int = TIMED_PER_KIND) -> Iterator[list[Posed]]:
        """Questions in batches whose prompts, of both kinds, fill at most half of the KV pool; one fits always."""
        config, num_blocks = self.llm.config, self.llm.stats()["num_blocks"]
        max_questions = max(1, min(MAX_QUESTIONS, MAX_LOGPROBS // config.model_config.text.vocab_size))
        batch: list[Posed] = []
        filled, seen = 0, Counter[str]()
        for question in questions:
            posed = Posed(question, self.prompts.asking(question),
                          self.prompts.showing(question, self.first_seen, self.rng),
                          seen[question.kind] < timed_per_kind)
            seen[question.kind] += 1
            needed = sum(-(-(inputs["input_ids"].shape[1] + self.max_tokens) // config.kvcache_block_size)
                         for inputs in (posed.asking, posed.showing))
            if batch and (len(batch) == max_questions or 2 * (filled + needed) > num_blocks):
                yield batch
                batch, filled = [], 0
            batch.append(posed)
            filled += needed
        if batch:
            yield batch

    def outcomes(self, batch: Sequence[Posed], ratios: Sequence[Ratio]) -> list[Outcome]:
        """Full prefill in a fresh context first; then each ratio, the pictures having been seen elsewhere."""
        asking = [posed.asking for posed in batch]
        self.llm.reset_caches()
        full = self._replies(asking, 0.0)
        replies = [full]
        self.llm.reset_caches()
        self._generate([posed.showing for posed in batch], 1, recompute_ratio=0.0)
        replies += [self._replies(asking, ratio) for ratio in ratios]
        times = [self._times(posed, ratios) if posed.timed else [None] * len(replies) for posed in batch]
        return [_outcome(posed.question, setting - 1, mine[i], full[i], times[i][setting])
                for i, posed in enumerate(batch) for setting, mine in enumerate(replies)]

    def _replies(self, asking: Sequence[Inputs], ratio: Ratio) -> list[Reply]:
        """Asked twice: for the first token's distribution, and for the answer."""
        firsts = self._generate(asking, 1, recompute_ratio=ratio, logprobs=-1)
        answers = firsts if self.max_tokens == 1 else self._generate(asking, self.max_tokens, recompute_ratio=ratio)
        image_id, replies = self.llm.config.model_config.image_token_id, []
        for inputs, first, answer in zip(asking, firsts, answers):
            logprobs = first["logprobs"][0]
            replies.append(Reply(answer["token_ids"], answer["text"],
                                 np.array([logprobs[token] for token in range(len(logprobs))]),
                                 int((inputs["input_ids"] == image_id).sum()), answer["num_reused_tokens"]))
        return replies

    def _times(self, posed: Posed, ratios: Sequence[Ratio]) -> list[float]:
        """Seconds to the first token of full prefill, pictures encoded anew, and at each ratio; the request alone, and
        asked twice, so that all that its step needs is compiled."""
        def ask(ratio: Ratio) -> float:
            [output] = self._generate([posed.asking], 1, recompute_ratio=ratio)
            return float(output["ttft"])

        for _ in range(2):
            self.llm.reset_caches()
            full = ask(0.0)
        self.llm.reset_caches()
        self._generate([posed.showing], 1, recompute_ratio=0.0)
        return [full, *([ask(ratio), ask(ratio)][1] for ratio in ratios)]

    def _generate(self, prompts: Sequence[Inputs], max_tokens: int, **options: Any) -> list[Any]:
        params = SamplingParams(max_tokens=max_tokens, top_k=1, **options)
        return self.llm.generate([inputs["input_ids"][0].tolist() for inputs in prompts], params, list(prompts),
                                 use_tqdm=False)


def _outcome(question: Question, setting: int, reply: Reply, full: Reply, ttft: float | None) -> Outcome:
    return Outcome(
        question.kind, setting, None if question.answer is None else is_right(reply.text, question.answer),
        first_equal=reply.token_ids[:1] == full.token_ids[:1], all_equal=reply.token_ids == full.token_ids,
        kl=kl_divergence(full.first, reply.first), image_tokens=reply.image_tokens,
        computed_tokens=reply.image_tokens - reply.reused_tokens, ttft=ttft)


def measure(examiner: Examiner, questions: Iterable[Question], ratios: Sequence[Ratio],
            done: Callable[[int], object], timed_per_kind: int = TIMED_PER_KIND) -> list[Outcome]:
    """Every question at every ratio, in batches; calls `done` with the size of each batch behind it."""
    outcomes: list[Outcome] = []
    for batch in examiner.batches(questions, timed_per_kind):
        outcomes += examiner.outcomes(batch, ratios)
        done(len(batch))
    return outcomes


def is_right(text: str, answer: str) -> bool:
    """Whether the text begins with the answer, word by word, whatever case and punctuation."""
    words, wanted = words_of(text), words_of(answer)
    return words[:len(wanted)] == wanted


def kl_divergence(reference: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Sum of p * (log p - log q) over the vocabulary; both [vocab] log-probabilities."""
    possible = np.exp(reference) > 0
    p, q = reference[possible], other[possible]
    return max(0.0, float((np.exp(p) * (p - q)).sum()))
