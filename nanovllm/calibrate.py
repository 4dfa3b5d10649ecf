"""Finds out which layers need an image's rows computed again, and shares a budget of rows among them."""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from tqdm.auto import tqdm

from nanovllm import LLM
from nanovllm.quality.__main__ import choose_questions, question_parser, writable
from nanovllm.quality.measure import ONE_ROW, Examiner, measure
from nanovllm.quality.questions import Question
from nanovllm.reuse_file import FILE_NAME, KEY


def layer_errors(examiner: Examiner, questions: Sequence[Question], bar: tqdm) -> list[float]:
    """Mean KL, in nats, for each l from 0 to the number of layers.

    All rows of the pictures are computed in the first l layers and one row above: how far the first token's
    distribution is from full prefill's is the error that reuse in the layers from l on brings in.
    """
    num_layers = examiner.llm.config.model_config.text.num_layers
    ratios = [(1.0,) * layer + (ONE_ROW,) * (num_layers - layer) for layer in range(num_layers + 1)]
    outcomes = measure(examiner, questions, ratios, bar.update, timed_per_kind=0)
    return [fmean(outcome.kl for outcome in outcomes if outcome.setting == layer)
            for layer in range(num_layers + 1)]


def shares_of(errors: Sequence[float]) -> list[float]:
    """Per layer how much error reuse in it brings in, made non-increasing at the smallest squared change: layers out of
    order are pooled."""
    pools: list[list[float]] = []
    for error, below in pairwise(errors):
        pools.append([max(0.0, error - below)])
        while len(pools) > 1 and fmean(pools[-2]) < fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [fmean(pool) for pool in pools for _ in pool]


def ratios_of(errors: Sequence[float], budget: float, image_sizes: Sequence[int]) -> list[float]:
    """A ratio per layer whose computed rows, over images of `image_sizes` tokens, are at most those of the flat ratio
    `budget`.

    If the error that a layer brings in falls as 1 / ratio, ratios in proportion to its root are best for their sum.
    """
    roots = [math.sqrt(share) for share in shares_of(errors)]
    if not any(roots):
        return [budget] * len(roots)            # nothing to tell the layers apart by
    allowed = num_rows([budget] * len(roots), image_sizes)
    low, high = 0.0, 1 / max(min(root for root in roots if root), 1e-9)
    for _ in range(60):                         # rows grow with the scale
        scale = (low + high) / 2
        fits = num_rows([min(1.0, scale * root) for root in roots], image_sizes) <= allowed
        low, high = (scale, high) if fits else (low, scale)
    ratios = [math.floor(1e6 * min(1.0, low * root)) / 1e6 for root in roots]
    return ratios if any(ratios) else [budget] * len(roots)


def num_rows(ratios: Sequence[float], image_sizes: Sequence[int]) -> int:
    """Rows computed in all layers together, rounded up image by image as the engine does."""
    return sum(math.ceil(ratio * size) for ratio in ratios for size in image_sizes)


def image_sizes_of(examiner: Examiner, questions: Sequence[Question]) -> list[int]:
    """Tokens of each image of the questions."""
    vision = examiner.llm.config.model_config.vision
    assert vision is not None
    return [math.prod(grid) // vision.spatial_merge_size**2 for question in questions
            for grid in examiner.prompts.asking(question)["image_grid_thw"].tolist()]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = question_parser("python -m nanovllm.calibrate", __doc__)
    parser.add_argument("--budget", type=float, default=0.05, help="the flat ratio whose rows may be spent")
    parser.add_argument("--out", type=writable, help=f"default: {FILE_NAME} in the model's folder")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not 0 < args.budget < 1:
        raise ValueError(f"--budget {args.budget}: give a ratio above 0 and below 1")
    questions = choose_questions(args.questions, args.limit, args.seed)
    with (LLM(args.model, device=args.device, enable_prefix_caching=False) as llm,
          tqdm(total=len(questions), desc="Questions", dynamic_ncols=True) as bar):
        examiner = Examiner(llm, max_tokens=1, seed=args.seed)
        errors, sizes = layer_errors(examiner, questions, bar), image_sizes_of(examiner, questions)
        out = args.out or Path(llm.config.model_config.path, FILE_NAME)
    ratios = ratios_of(errors, args.budget, sizes)
    out.write_text(json.dumps({KEY: ratios, "budget": args.budget, "num_questions": len(questions), "seed": args.seed,
                               "kl_with_layers_computed": errors}, indent=2) + "\n", encoding="utf-8")
    print(f"{'layer':>5}{'KL computed below it':>22}{'ratio':>10}")
    for layer, (error, ratio) in enumerate(zip(errors, ratios)):
        print(f"{layer:>5}{error:>22.3e}{ratio:>10.4f}")
    print(f"rows: {num_rows(ratios, sizes)} against {num_rows([args.budget] * len(ratios), sizes)} at a flat "
          f"{args.budget}\nwritten to {out}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
