"""Reports what reuse costs in accuracy and saves in time, for a model and a file of questions."""
from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

from tqdm.auto import tqdm

from nanovllm import LLM
from nanovllm.quality.measure import ONE_ROW, Examiner, Ratio, measure
from nanovllm.quality.prompts import FIRST_SEEN
from nanovllm.quality.questions import Question, builtin_questions, read_questions
from nanovllm.quality.report import as_dicts, plot, summarize, table
from nanovllm.quality.shapes import KINDS
from nanovllm.reuse_file import read_ratios

DEFAULT_RATIOS = ["1", "0.5", "0.2", "0.1", "0.05", "0.02", "row"]
BUILTIN_PER_KIND = 200


def parse_ratio(word: str) -> Ratio:
    """A number, "row" for one row of each picture, or the path of a file with one number per layer."""
    if word == "row":
        return ONE_ROW
    try:
        return float(word)
    except ValueError:
        return read_ratios(word)


def choose_questions(file: Path | None, limit: int | None, seed: int) -> list[Question]:
    """The file's, or the built-in ones; `limit` of them, all kinds alike for the built-in ones."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: give a number of questions of at least 1, or leave it out for all")
    if file is not None:
        return read_questions(file)[:limit]
    per_kind = BUILTIN_PER_KIND if limit is None else -(-limit // len(KINDS))
    return list(islice(builtin_questions(per_kind, seed), limit))


def writable(word: str) -> Path:
    """A file to be written, refused where its folder is missing before hours are spent on what it is to hold."""
    path = Path(word)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder: make it, or give another file")
    return path


def question_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Arguments of a command that asks a model questions: model, questions, how many, device."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("model", help="folder or hub id of a vision-language model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--questions", type=Path, help="JSONL: images, question or messages; before, kind, answer")
    source.add_argument("--builtin", action="store_true", help="questions about shapes, 200 of each kind")
    parser.add_argument("--limit", type=int, help="questions at most")
    parser.add_argument("--seed", type=int, default=0, help="of the built-in questions, and of what stands in front of "
                                                            "pictures where they are first seen")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = question_parser("python -m nanovllm.quality", __doc__)
    parser.add_argument("--ratios", nargs="+", default=DEFAULT_RATIOS,
                        help='numbers, "row" for one row of each picture, or files that nanovllm.calibrate wrote')
    parser.add_argument("--first-seen", choices=FIRST_SEEN, default="elsewhere",
                        help="what was around the pictures when they were first seen")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=writable, help="draw accuracy and KL against the share of rows computed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    ratios = [parse_ratio(word) for word in args.ratios]
    questions = choose_questions(args.questions, args.limit, args.seed)
    with (LLM(args.model, device=args.device, enable_prefix_caching=False) as llm,
          tqdm(total=len(questions), desc="Questions", dynamic_ncols=True) as bar):
        outcomes = measure(Examiner(llm, args.max_tokens, args.first_seen, args.seed), questions, ratios, bar.update)
    names = ["one row" if word == "row" else word for word in args.ratios]
    lines = summarize(outcomes, names)
    print(json.dumps({"model": args.model, "first_seen": args.first_seen, "seed": args.seed, "lines": as_dicts(lines)})
          if args.json else table(lines))
    if args.plot is not None:
        plot(lines, args.plot, f"{Path(args.model).name}: {len(questions)} questions")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
