"""Greedy parity with transformers over drawn checkpoints and prompts: `python -m tests.parity --cases 40`.

transformers runs on the CPU, in float32 unless asked otherwise, whatever the engine runs in.
"""
from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanovllm import LLM
from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.engines import dense_logprobs, greedy, make_llm, run
from tests.oracle import Oracle
from tests.prompts import TOKENIZER, Picture, Prompt, picture, prompt, text, video

STEPS = 32
SMALL_BLOCK = 16        # tokens of a KV block in the runs that want small ones
Greedy = tuple[list[int], Tensor]       # tokens, logprobs [steps, vocab]


@dataclass(frozen=True)
class Case:
    """One checkpoint and prompts for it, drawn by a seed; odd seeds have images."""

    seed: int
    multimodal: bool
    options: dict[str, Any]     # of the checkpoint's maker
    prompts: list[Prompt]

    @property
    def kinds(self) -> str:
        """The pictures of each prompt in order, i for an image and v for a video."""
        kinds = ("".join("i" if p.seconds is None else "v" for _, p in each.pictures) for each in self.prompts)
        return "+".join(kind or "-" for kind in kinds)


@dataclass(frozen=True)
class Run:
    """How an engine is set up for one pass over a case's prompts."""

    name: str
    small_blocks: bool = False
    passes: int = 1
    small_pool: bool = False
    options: tuple[tuple[str, Any], ...] = ()


RUNS = (
    Run("whole", options=(("enable_prefix_caching", False),)),
    Run("budget 64", options=(("enable_prefix_caching", False), ("max_num_batched_tokens", 64))),
    Run("budget 256", options=(("enable_prefix_caching", False), ("max_num_batched_tokens", 256))),
    Run("cold, warm", passes=2),
    Run("cold, warm, budget 64, small blocks", small_blocks=True, passes=2, options=(("max_num_batched_tokens", 64),)),
    Run("small pool, overlap", small_blocks=True, small_pool=True,
        options=(("max_num_batched_tokens", 256), ("overlap", True))),
    Run("small pool, no prefix cache", small_blocks=True, small_pool=True,
        options=(("enable_prefix_caching", False), ("max_num_batched_tokens", 64))),
)


@dataclass
class Outcome:
    """What the runs of a case gave, beside the reference."""

    tokens_equal: bool = True
    max_difference: float = 0.0         # of logprobs, whole vocabulary, all steps up to a token that differs
    preemptions: int = 0
    cached_tokens: int = 0              # of warm passes


# ---------------------------------------------------------------- cases

def draw_case(seed: int) -> Case:
    """The case of a seed, always the same."""
    rng = random.Random(seed)
    common = dict(seed=seed, tie=rng.random() < 0.4, vocab_padding=rng.choice((0, 13)), num_shards=rng.choice((1, 3)),
                  new_config=rng.random() < 0.5, num_hidden_layers=rng.randint(1, 4),
                  intermediate_size=rng.choice((64, 96, 160)), rope={"rope_theta": rng.choice((5000.0, 1e6))})
    if seed % 2 == 0:
        return Case(seed, False, common | _draw_text_sizes(rng), _draw_texts(rng, seed))
    return Case(seed, True, common | _draw_vision_sizes(rng), _draw_picture_prompts(rng, seed))


def _draw_text_sizes(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 3, 4, 6, 8))
    sizes: dict[str, Any] = dict(
        num_attention_heads=heads, num_key_value_heads=_draw_divisor(rng, heads), head_dim=rng.choice((16, 32, 80)),
        hidden_size=rng.choice((48, 64, 96)), attention_bias=rng.random() < 0.5)
    if rng.random() < 0.25:
        sizes["rope"] = dict(rope_theta=5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=256)
    return sizes


def _draw_vision_sizes(rng: random.Random) -> dict[str, Any]:
    heads, depth, vision_heads = rng.choice((2, 3, 4, 6)), rng.randint(1, 5), rng.choice((1, 2, 3))
    vision = dict(depth=depth, fullatt_block_indexes=sorted(rng.sample(range(depth), rng.randint(0, depth))),
                  window_size=rng.choice((56, 84, 112, 140)), num_heads=vision_heads,
                  hidden_size=vision_heads * rng.choice((16, 20)), tokens_per_second=rng.choice((2, 4)))
    return dict(num_attention_heads=heads, num_key_value_heads=_draw_divisor(rng, heads),
                hidden_size=heads * rng.choice((16, 32)), new_names=rng.random() < 0.5, vision=vision)


def _draw_divisor(rng: random.Random, number: int) -> int:
    return rng.choice([d for d in range(1, number + 1) if number % d == 0])


def _draw_texts(rng: random.Random, seed: int) -> list[Prompt]:
    """Three prompts; the second starts like the first."""
    first, second, third = rng.randint(1, 400), rng.randint(1, 60), rng.randint(1, 300)
    shared = text(first, seed)
    branch = shared[:rng.randint(1, first)] + text(second, seed + 1)
    return [prompt(shared), prompt(branch), prompt(text(third, seed + 2))]


def _draw_picture_prompts(rng: random.Random, seed: int) -> list[Prompt]:
    """Two prompts of zero to three images and maybe a video each, text between them; some pictures are in both."""
    large = (700, 504) if rng.random() < 0.3 else (28 * rng.randint(2, 25), 28 * rng.randint(2, 18))
    small = 28 * rng.randint(2, 8), 28 * rng.randint(2, 8)
    pool = [picture(*size, seed=i) for i, size in enumerate((large, small, (56, 56), (56, 140)))]
    clip = video(rng.randint(1, 4), 28 * rng.randint(2, 5), 28 * rng.randint(2, 5), rng.choice((0.5, 1.0, 1.5)))
    prompts = []
    for number, minimum in enumerate((1, 0)):
        shown = rng.sample(pool, rng.randint(minimum, 3)) + [clip] * (rng.random() < 0.4)
        rng.shuffle(shown)
        parts: list[Sequence[int] | Picture] = [text(rng.randint(0, 40), seed)]
        for i, each in enumerate(shown):
            parts += [each, text(rng.randint(0, 12), seed + i)]
        prompts.append(prompt(*parts, text(rng.randint(1, 60), seed + number)))
    return prompts


# ---------------------------------------------------------------- transformers

@torch.inference_mode()
def transformers_greedy(case: Case, folder: Path, dtype: str) -> list[Greedy]:
    """`STEPS` greedy steps for each prompt, with transformers' own cache."""
    auto = AutoModelForImageTextToText if case.multimodal else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    oracle = Oracle(folder) if case.multimodal else None
    return [_greedy(model, each, oracle) for each in case.prompts]


def _greedy(model: Any, prompt: Prompt, oracle: Oracle | None) -> Greedy:
    inputs: dict[str, Any] = dict(input_ids=torch.tensor([prompt.token_ids])) | (prompt.mm_inputs or {})
    inputs.pop("second_per_grid_ts", None)      # only transformers' own positions, wrong for video, would read it
    positions = None
    if oracle is not None and any(p.seconds is not None for _, p in prompt.pictures):
        positions = oracle.positions(prompt, len(prompt) + STEPS)[:, None]
        inputs["position_ids"] = positions[..., :len(prompt)]
    elif oracle is not None:
        model.model.rope_deltas = None          # of the prompt before
        inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        for start, each in prompt.pictures:
            inputs["mm_token_type_ids"][0, start:start + each.num_tokens] = 1
    tokens, rows, cache = [], [], None
    for step in range(STEPS):
        out = model(**inputs, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[0, -1].float()
        rows.append(logits.log_softmax(-1))
        tokens.append(int(logits[:len(TOKENIZER)].argmax()))        # padding of the vocabulary is never sampled
        inputs = dict(input_ids=torch.tensor([[tokens[-1]]]))
        if positions is not None:
            inputs["position_ids"] = positions[..., len(prompt) + step:len(prompt) + step + 1]
    return tokens, torch.stack(rows)


# ---------------------------------------------------------------- nanovllm

def compare(case: Case, folder: Path, block_size: int = SMALL_BLOCK, reference_dtype: str = "float32",
            **options: Any) -> Outcome:
    """Every run of the case against transformers; `options` are the engine's in all of them."""
    expected, outcome = transformers_greedy(case, folder, reference_dtype), Outcome()
    for each in RUNS:
        own = options | dict(each.options)
        if each.small_pool:
            own["num_kvcache_blocks"] = small_pool(case.prompts, block_size)
        _compare_run(case, make_llm(folder, block_size=block_size if each.small_blocks else None, **own), each.passes,
                     expected, outcome)
    return outcome


def _compare_run(case: Case, llm: LLM, passes: int, expected: list[Greedy], outcome: Outcome) -> None:
    with llm:
        for _ in range(passes):
            outputs = run(llm, case.prompts, greedy(STEPS, logprobs=-1))
            for output, (tokens, logprobs) in zip(outputs, expected):
                equal = [ours == theirs for ours, theirs in zip(output["token_ids"], tokens)]
                outcome.tokens_equal &= all(equal)
                steps = (equal + [False]).index(False) + 1
                difference = (dense_logprobs(output) - logprobs)[:steps].abs().max().item()
                outcome.max_difference = max(outcome.max_difference, difference)
        outcome.preemptions += llm.stats()["preemptions"]
        if passes > 1:
            outcome.cached_tokens += sum(output["num_cached_tokens"] for output in outputs)


def small_pool(prompts: Sequence[Prompt], block_size: int) -> int:
    """KV blocks for all prompts and one more, so that decoding runs out of them; enough for each prompt alone."""
    alone = max(-(-(len(each) + STEPS) // block_size) for each in prompts)
    return max(alone, sum(-(-len(each) // block_size) for each in prompts) + 1)


def make_checkpoint(case: Case, folder: Path) -> Path:
    return (make_qwen2_5_vl if case.multimodal else make_qwen3)(folder, **case.options)


def compare_seeds(seeds: Sequence[int], **options: Any) -> Iterator[tuple[Case, Outcome]]:
    for seed in seeds:
        case = draw_case(seed)
        with tempfile.TemporaryDirectory() as folder:
            yield case, compare(case, make_checkpoint(case, Path(folder)), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--block-size", type=int, default=SMALL_BLOCK, help="of the runs with small KV blocks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--reference-dtype", default="float32", help="of transformers")
    parser.add_argument("--attention-backend", default="auto")
    args = parser.parse_args()
    options = dict(block_size=args.block_size, reference_dtype=args.reference_dtype, device=args.device,
                   dtype=args.dtype, attention_backend=args.attention_backend)
    if args.device != "cpu":        # small engines: a case makes seven
        options |= dict(max_num_seqs=8, gpu_memory_utilization=0.1)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    start, total, equal = perf_counter(), Outcome(), 0
    print("case  model         pictures  prompt tokens  tokens equal  max logprob difference  preemptions  cached")
    for case, outcome in compare_seeds(range(args.first, args.first + args.cases), **options):
        lengths = "+".join(str(len(each)) for each in case.prompts)
        model, verdict = "qwen2_5_vl" if case.multimodal else "qwen3", "yes" if outcome.tokens_equal else "NO"
        print(f"{case.seed:4}  {model:10}  {case.kinds:>10}  {lengths:>13}  {verdict:>12}  "
              f"{outcome.max_difference:22.2e}  {outcome.preemptions:11}  {outcome.cached_tokens:6}", flush=True)
        equal += outcome.tokens_equal
        total.max_difference = max(total.max_difference, outcome.max_difference)
        total.preemptions += outcome.preemptions
    print(f"{equal} of {args.cases} cases with equal tokens in all of {len(RUNS)} runs; max logprob difference "
          f"{total.max_difference:.2e}; {total.preemptions} preemptions; {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
