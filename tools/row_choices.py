"""Compares, in a dense model, which rows of reused pictures are best computed again, in which layers.

    python -m tools.row_choices FOLDER [--table layers] [--experiment NAME] [--per-kind 200] [--seed 0] [--json FILE]
"""
from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from nanovllm.model_config import ModelConfig
from nanovllm.quality.measure import Outcome, kl_divergence
from nanovllm.quality.prompts import Prompts
from nanovllm.quality.questions import Question
from nanovllm.quality.report import ALL, as_dicts, summarize, table
from tools.reuse.choices import TABLES, Choice
from tools.reuse.dense import KV, Dense, Prompt
from tools.reuse.donors import EXPERIMENTS, Donors, Experiment

BATCH = 16
WITHOUT_VIDEO = [name for name, experiment in EXPERIMENTS.items() if name != "video before" and experiment.turned]


@dataclass(frozen=True)
class Posed:
    """A question, the prompt that asks it, the prompt that shows its pictures first, and where they are there."""

    question: Question
    asking: Prompt
    showing: Prompt
    sources: tuple[int | None, ...]     # per picture: its index in `showing`; None: it is new
    answer: int                         # the answer's first token


class Bench:
    """A dense model with its processor."""

    def __init__(self, folder: str) -> None:
        self.dense = Dense(folder)
        self.prompts = Prompts(ModelConfig.from_folder(folder))

    def pose(self, question: Question, experiment: Experiment, rng: random.Random) -> Posed:
        shown = experiment.how(question.pictures, rng)
        sources = tuple(shown.pictures.index(picture) if picture in shown.pictures else None
                        for picture in question.pictures)
        answer = self.prompts.processor.tokenizer(str(question.answer))["input_ids"][0]
        return Posed(question, self.dense.prompt(self.prompts.asking(question)),
                     self.dense.prompt(Donors(self.prompts, experiment.how).shown(shown, rng)), sources, answer)

    def outcomes(self, batch: Sequence[Posed], choices: Sequence[Choice]) -> Iterator[Outcome]:
        """Full prefill, then each choice, of which only the rows behind a picture's first are computed anew."""
        asking = [posed.asking for posed in batch]
        full, exact = self.dense.run(asking)
        _, shown = self.dense.run([posed.showing for posed in batch])
        given = given_kv(batch, exact, shown)
        yield from (_outcome(posed, -1, full[i], full[i], 1.0) for i, posed in enumerate(batch))
        for setting, choice in enumerate(choices):
            computed = computed_rows(batch, choice, exact, given)
            logprobs, _ = self.dense.run(asking, given, computed)
            yield from (_outcome(posed, setting, logprobs[i], full[i], _share(posed, computed[:, i]))
                        for i, posed in enumerate(batch))


def given_kv(batch: Sequence[Posed], exact: KV, shown: KV) -> KV:
    """The exact KV, with that of pictures which were shown before put in their places."""
    given = KV(exact.keys.clone(), exact.values.clone())
    for i, posed in enumerate(batch):
        for (start, stop), source in zip(posed.asking.images, posed.sources):
            if source is not None:
                first, end = posed.showing.images[source]
                given.keys[:, i, start:stop] = shown.keys[:, i, first:end]
                given.values[:, i, start:stop] = shown.values[:, i, first:end]
    return given


def computed_rows(batch: Sequence[Posed], choice: Choice, exact: KV, given: KV) -> Tensor:
    """bool [layers, prompts, tokens]; what stands before the first picture is exact as it is given."""
    num_layers, _, num_tokens = exact.keys.shape[:3]
    computed = torch.zeros(num_layers, len(batch), num_tokens, dtype=torch.bool)
    for i, posed in enumerate(batch):
        computed[:, i, posed.asking.images[0][0]:len(posed.asking)] = True
        for (start, stop), source in zip(posed.asking.images, posed.sources):
            if source is not None:
                # Layer 0 sees no context: its keys are the same wherever they are computed.
                apart = (exact.keys[1, i, start:stop] - given.keys[1, i, start:stop]).flatten(1).norm(dim=1)
                computed[:, i, start:stop] = choice.choose(num_layers, stop - start, apart.argsort())
    return computed


def _share(posed: Posed, computed: Tensor) -> float:
    """Of the rows of pictures, over all layers; computed bool [layers, tokens]."""
    return torch.cat([computed[:, start:stop] for start, stop in posed.asking.images], dim=1).float().mean().item()


def _outcome(posed: Posed, setting: int, logprobs: Tensor, full: Tensor, share: float) -> Outcome:
    """Of the first token; the rows are those of one layer in the mean."""
    first, wanted = int(logprobs.argmax()), int(full.argmax())
    rows = sum(stop - start for start, stop in posed.asking.images)
    return Outcome(posed.question.kind, setting, first == posed.answer, first == wanted, first == wanted,
                   kl_divergence(full.double().numpy(), logprobs.double().numpy()), rows, round(share * rows), None)


def measure(bench: Bench, experiment: Experiment, choices: Sequence[Choice], per_kind: int, seed: int) -> list[Outcome]:
    rng = random.Random(f"first seen {seed}")
    questions = sorted(experiment.questions(per_kind, seed), key=lambda question: (     # less padding
        question.kind == "text before", sum(scene.height * scene.width for scene in question.pictures)))
    outcomes: list[Outcome] = []
    with tqdm(total=len(questions), desc="Questions") as bar:
        for first in range(0, len(questions), BATCH):
            batch = [bench.pose(question, experiment, rng) for question in questions[first:first + BATCH]]
            outcomes += bench.outcomes(batch, choices)
            bar.update(len(batch))
    return outcomes


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--table", choices=TABLES, default="rows")
    parser.add_argument("--experiment", choices=WITHOUT_VIDEO, default="elsewhere")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the questions and of the other prompts")
    parser.add_argument("--json", type=Path, help="write the lines of all kinds to this file")
    args = parser.parse_args(argv)
    bench = Bench(args.folder)
    choices = TABLES[args.table](bench.dense.num_layers)
    outcomes = measure(bench, EXPERIMENTS[args.experiment], choices, args.per_kind, args.seed)
    lines = summarize(outcomes, [choice.name for choice in choices])
    print(f"{args.experiment}, seed {args.seed}: {table([line for line in lines if line.kind == ALL])}")
    if args.json is not None:
        args.json.write_text(json.dumps({"experiment": args.experiment, "seed": args.seed, "lines": as_dicts(lines)},
                                        indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
