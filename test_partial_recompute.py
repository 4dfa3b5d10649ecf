"""The experiment of partial recompute: what a picture that comes back costs, and what its answer loses.

    python test_partial_recompute.py [--model DIR | --size 3b] [--image FILE] [--ratio 0.1] [--json]

Every phase runs in a process of its own and asks pairs of requests: the first one with empty caches (cold), the second
one with the same picture in it (warm). Phase 1 computes every prompt in full; phase 2 reuses the picture's KV at the
same place, phase 3 at other places; phase 4 has exact prefix caching and no reuse. Exits with 1 unless the warm request
of phase 2 is clearly faster than that of phase 1.
"""
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

from benchmarks.models import SHAPES_MODEL, ModelFolder, open_model
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.quality.pictures import draw
from nanovllm.quality.shapes import draw_scene

T = TypeVar("T")
RULE = "=" * 60
PICTURE_SIZE, OTHER_SIZE = (3840, 2160), (336, 336)
PIXELS_A_DOT = 8                    # of a painted picture, which is enlarged to its size
PASSING_SHARE = 0.9                 # of the baseline's warm TTFT
SHORT_SYSTEM = "You are a helpful assistant."
LONG_SYSTEM = ("You look at drawings that children sent in. Describe shapes, colours and places in short, plain "
               "sentences; name each shape once, from left to right, and do not guess what a drawing means. ") * 3
ONE_QUESTION, OTHER_QUESTION = "what colour is at row 1 column 1?", "what shape is at row 2 column 2?"


@dataclass(frozen=True)
class Prompt:
    """A system text, pictures by name, a question."""

    system: str
    pictures: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Pair:
    """A cold request, the warm one after it, and whether the picture may come from another place in the order."""

    name: str
    first: Prompt
    second: Prompt
    any_ordinal: bool = False


FIRST = Prompt(SHORT_SYSTEM, ("picture",), ONE_QUESTION)
SAME_PLACE = Prompt(SHORT_SYSTEM, ("picture",), OTHER_QUESTION)
MOVED = Prompt(LONG_SYSTEM, ("picture",), OTHER_QUESTION)
FIRST_OF_TWO = Prompt(SHORT_SYSTEM, ("other", "picture"), f"in image 2, {ONE_QUESTION}")
SECOND_OF_TWO = Prompt(SHORT_SYSTEM, ("another", "picture"), f"in image 2, {OTHER_QUESTION}")

STAYS = Pair("same place, other question", FIRST, SAME_PLACE)
MOVED_PAIRS = (
    Pair("longer text before it", FIRST, MOVED),
    Pair("second of two, cached as second of two", FIRST_OF_TWO, SECOND_OF_TWO),
    Pair("second of two, cached as the only one (reuse_any_ordinal)", FIRST, SECOND_OF_TWO, any_ordinal=True),
)


@dataclass(frozen=True)
class Phase:
    title: str
    ratio: float
    pairs: tuple[Pair, ...]
    prefix_caching: bool = False


def phases(ratio: float) -> list[Phase]:
    """The first one holds every warm prompt that the others are compared on."""
    everything = (STAYS, *MOVED_PAIRS)
    return [Phase("Phase 1: Baseline  (recompute_ratio=0.0)", 0.0, everything[:3]),
            Phase(f"Phase 2: Partial recompute  (recompute_ratio={ratio})", ratio, (STAYS,)),
            Phase(f"Phase 3: Partial recompute, picture moved  (recompute_ratio={ratio})", ratio, MOVED_PAIRS),
            Phase("Phase 4: Exact prefix caching alone  (recompute_ratio=0.0)", 0.0, everything, prefix_caching=True)]


@dataclass(frozen=True)
class PairResult:
    """What one pair measured; token counts are the warm request's, times are in ms."""

    pair: Pair
    image_tokens: int
    recomputed: int
    reused: int
    cached: int
    prompt1: int
    prompt2: int
    entries: int
    cold_ttft: float
    cold_vit: float
    warm_ttft: float
    warm_vit: float
    token_ids: list[int]
    answer: str
    first_token: dict[int, float]       # log-probabilities of the warm request's first token, whole vocabulary


# ---------------------------------------------------------------- one phase, in a process of its own

class Asker:
    """An engine, and the processor that turns prompts into its input."""

    def __init__(self, folder: ModelFolder, pictures: Mapping[str, Path], phase: Phase, device: str | None) -> None:
        self.processor: ProcessorMixin = AutoProcessor.from_pretrained(folder.path)
        self.pictures = {name: Image.open(file).convert("RGB") for name, file in pictures.items()}
        self.llm = LLM(folder.path, recompute_ratio=phase.ratio, enable_prefix_caching=phase.prefix_caching,
                       device=device, **folder.options)

    def inputs(self, prompt: Prompt) -> Mapping[str, Any]:
        content = [{"type": "image", "image": self.pictures[name]} for name in prompt.pictures]
        messages = [{"role": "system", "content": [{"type": "text", "text": prompt.system}]},
                    {"role": "user", "content": [*content, {"type": "text", "text": prompt.question}]}]
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")

    def ask(self, inputs: Mapping[str, Any], pair: Pair, max_tokens: int, logprobs: int | None = None) -> RequestOutput:
        params = SamplingParams(max_tokens=max_tokens, top_k=1, logprobs=logprobs, reuse_any_ordinal=pair.any_ordinal)
        return self.llm.generate(inputs["input_ids"].tolist(), params, [inputs], use_tqdm=False)[0]

    def measure(self, pair: Pair, max_tokens: int) -> PairResult:
        """The pair twice: for the warm request's first-token distribution, which compiles all it needs; then timed."""
        first, second = self.inputs(pair.first), self.inputs(pair.second)
        self.llm.reset_caches()
        self.ask(first, pair, max_tokens)
        distribution = self.ask(second, pair, 1, logprobs=-1)["logprobs"][0]
        self.llm.reset_caches()
        cold = self.ask(first, pair, max_tokens)
        entries = self.llm.scheduler.block_manager.image_kv_cache
        num_entries = len(entries)
        image_tokens = max(entry.num_tokens for variants in entries.values() for entry in variants.values())
        warm = self.ask(second, pair, max_tokens)
        return PairResult(
            pair, image_tokens, warm["num_recomputed_image_tokens"], warm["num_reused_tokens"],
            warm["num_cached_tokens"], cold["num_prompt_tokens"], warm["num_prompt_tokens"], num_entries,
            1e3 * cold["ttft"], 1e3 * cold["vit_time"], 1e3 * warm["ttft"], 1e3 * warm["vit_time"],
            warm["token_ids"], warm["text"], distribution)


def run_phase(folder: ModelFolder, pictures: Mapping[str, Path], phase: Phase, device: str | None,
              max_tokens: int) -> list[PairResult]:
    if folder.path == str(SHAPES_MODEL):
        torch.set_num_threads(1)        # so small a model mostly waits for its threads
    asker = Asker(folder, pictures, phase, device)
    with asker.llm:
        return [asker.measure(pair, max_tokens) for pair in phase.pairs]


def run_in_process(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a fresh process, which ends with the call."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ---------------------------------------------------------------- report

def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Sum of p * (log p - log q) over the vocabulary, p and q given as log-probabilities by token id; in nats."""
    return sum(math.exp(p) * (p - other[token]) for token, p in reference.items())


def print_phase(phase: Phase, results: list[PairResult], full: Mapping[Prompt, PairResult]) -> None:
    """`full`: the baseline's result for each warm prompt."""
    print(f"{RULE}\n{phase.title}\n{RULE}")
    for result in results:
        reference = full[result.pair.second]
        if len(results) > 1:
            print(f"-- {result.pair.name}")
        print(f"Image tokens: {result.image_tokens}, R: {result.recomputed}, Reused: {result.reused}, "
              f"Prompt1: {result.prompt1}, Prompt2: {result.prompt2}")
        print(f"After req1: image_kv_cache={result.entries} entries")
        print(f"[Req 1 cold] TTFT: {result.cold_ttft:.1f} ms  VIT: {result.cold_vit:.1f} ms")
        print(f"[Req 2 warm] TTFT: {result.warm_ttft:.1f} ms  VIT: {result.warm_vit:.1f} ms")
        if result is not reference:
            print(f"Exact prefix hits: {result.cached}.  Against full prefill: {agreement(result, reference)}, "
                  f"{reference.warm_ttft / result.warm_ttft:.2f}x as fast")
        print(f"Answer of request 2: {result.answer!r}")
    print()


def agreement(result: PairResult, full: PairResult) -> str:
    tokens = "equal" if result.token_ids == full.token_ids else "differ"
    return f"greedy tokens {tokens}, KL of first token {kl_divergence(full.first_token, result.first_token):.2e}"


def print_summary(baseline: PairResult, partial: PairResult) -> bool:
    """The verdict; True for PASS."""
    passed = partial.warm_ttft <= PASSING_SHARE * baseline.warm_ttft
    print(f"{RULE}\nSummary\n{RULE}")
    print(f"Req2 warm speedup: {baseline.warm_ttft / partial.warm_ttft:.2f}x  "
          f"({baseline.warm_ttft - partial.warm_ttft:+.1f} ms)")
    print("PASS: Partial recompute significantly reduces warm TTFT" if passed else
          f"FAIL: warm TTFT is above {PASSING_SHARE} of the baseline's")
    return passed


def as_json(plan: list[Phase], results: list[list[PairResult]], full: Mapping[Prompt, PairResult]) -> str:
    """One object: for each phase its pairs, with how far each is from full prefill."""
    phases_by_title: dict[str, list[dict[str, Any]]] = {}
    for phase, measured in zip(plan, results):
        rows = phases_by_title[phase.title] = []
        for result in measured:
            reference = full[result.pair.second]
            row = asdict(result) | dict(pair=result.pair.name, tokens_equal=result.token_ids == reference.token_ids,
                                        kl=kl_divergence(reference.first_token, result.first_token))
            del row["first_token"]
            rows.append(row)
    return json.dumps(phases_by_title)


def paint_picture(file: Path, size: tuple[int, int], seed: int) -> None:
    """Coloured shapes in two or three rows and columns, as a file of so many pixels."""
    width, height = size
    scene = draw_scene(random.Random(seed), max_side=3)
    [dots] = draw([replace(scene, width=width // PIXELS_A_DOT, height=height // PIXELS_A_DOT)])
    Image.fromarray(dots.numpy()).resize(size).save(file)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="folder or hub id; default: the small trained one in assets/")
    model.add_argument("--size", choices=("3b", "7b"), help="a published size, with random weights")
    parser.add_argument("--image", type=Path, help="a picture file; default: one of 3840x2160 painted here")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of a reused picture's tokens to recompute")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--max-tokens", type=int, default=16, help="greedy tokens that are compared")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON line at the end")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    plan, results = phases(args.ratio), []
    model = args.model if args.model or args.size else str(SHAPES_MODEL)
    with open_model(model, args.size) as folder, TemporaryDirectory(prefix="nanovllm-") as scratch:
        pictures = {name: Path(scratch, f"{name}.png") for name in ("other", "another", "picture")}
        for seed, (name, file) in enumerate(pictures.items()):
            paint_picture(file, PICTURE_SIZE if name == "picture" else OTHER_SIZE, seed)
        pictures["picture"] = args.image or pictures["picture"]
        print(f"model: {folder.name} ({folder.weights} weights)   picture: {pictures['picture']}\n")
        for phase in plan:
            results.append(run_in_process(run_phase, folder, pictures, phase, args.device, args.max_tokens))
            full = {result.pair.second: result for result in results[0]}
            print_phase(phase, results[-1][:1] if phase is plan[0] else results[-1], full)
    passed = print_summary(results[0][0], results[1][0])
    if folder.weights == "dummy":
        print("The weights are random: times and counts are real, agreement says nothing about a trained model.")
    if args.json:
        print(as_json(plan, results, full))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
