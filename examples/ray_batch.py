"""Answers questions about pictures with one engine per GPU or CPU of a Ray cluster, each picture on one engine.

    python examples/ray_batch.py questions.jsonl answers.jsonl --model DIR --actors 2

A line of questions.jsonl is {"id": ..., "image": FILE, "question": TEXT}; answers.jsonl has the same lines with
"answer", the counts of prompt tokens (all, cached, reused) and the process that answered, in the order of their ends.
All questions about a picture, known by the hash of its file, go to one engine at one time, so that its tokens are
computed once in the cluster. Ray runs a group again if its engine dies: every line is answered once.
Needs `pip install nanovllm[ray]`.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from PIL import Image
from transformers import AutoProcessor

from nanovllm import LLM, SamplingParams

GROUPS_PER_ACTOR = 8        # more: less is done again when an engine dies, and less waits for the last one
Row = dict[str, Any]
Batch = dict[str, np.ndarray]


class Engine:
    """One engine in a Ray actor."""

    def __init__(self, model: str, max_tokens: int, options: dict[str, Any]) -> None:
        self.processor = AutoProcessor.from_pretrained(model)
        self.params = SamplingParams(max_tokens=max_tokens, top_k=1)
        self.llm = LLM(model, **options)

    def __call__(self, batch: Batch) -> Batch:
        """The rows of one group, with their answers."""
        rows: list[Row] = [json.loads(row) for row in batch["rows"][0]]
        # First one question about each picture, then all others: these find its tokens in the cache.
        first = {row["picture"]: index for index, row in reversed(list(enumerate(rows)))}
        waves = [sorted(first.values()), sorted(set(range(len(rows))) - set(first.values()))]
        for wave in filter(None, waves):
            self.answer([rows[index] for index in wave])
        return {"row": np.array([json.dumps(row) for row in rows])}

    def answer(self, rows: list[Row]) -> None:
        inputs = [self.inputs(row["image"], row["question"]) for row in rows]
        outputs = self.llm.generate([each["input_ids"][0].tolist() for each in inputs], self.params, inputs,
                                    use_tqdm=False)
        for row, output in zip(rows, outputs):
            row |= dict(answer=output["text"], actor=os.getpid(),
                        **{name: output[name] for name in ("num_prompt_tokens", "num_cached_tokens",
                                                           "num_reused_tokens")})

    def inputs(self, image: str, question: str) -> Any:
        content = [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": question}]
        return self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True,
                                                  tokenize=True, return_dict=True, return_tensors="pt")


def add_group(row: Row, num_groups: int, affinity: bool) -> Row:
    """The row with its picture's hash and the group that it is answered in: by picture, or by line."""
    picture = hashlib.sha256(Path(row["image"]).read_bytes()).hexdigest()
    key = picture if affinity else hashlib.sha256(str(row["id"]).encode()).hexdigest()
    return row | {"picture": picture, "group": int(key, 16) % num_groups}


def grouped(questions: str, num_groups: int, affinity: bool) -> list[Row]:
    """The groups that are not empty, each as one row {"rows": [JSON of a row, ...]}."""
    groups: dict[int, list[str]] = {}
    rows = ray.data.read_json(questions, lines=True)
    for row in rows.map(add_group, fn_kwargs=dict(num_groups=num_groups, affinity=affinity)).iter_rows():
        groups.setdefault(row["group"], []).append(json.dumps(row))
    return [{"rows": rows} for rows in groups.values()]


def answers(questions: str, model: str, actors: int, *, affinity: bool = True, max_tokens: int = 64,
            num_gpus: float = 0, options: dict[str, Any] | None = None) -> Iterator[Row]:
    """Answered rows as they are done; `num_gpus` for each actor, `options` for each `LLM`."""
    groups = grouped(questions, GROUPS_PER_ACTOR * actors, affinity)
    # A block a group: what is handed to an engine at a time, and what is done again if it dies.
    done = ray.data.from_items(groups, override_num_blocks=len(groups)).map_batches(
        Engine, fn_constructor_kwargs=dict(model=model, max_tokens=max_tokens, options=options or {}), batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=actors), num_cpus=1, num_gpus=num_gpus)
    for row in done.iter_rows():
        yield json.loads(row["row"])


def reuse_share(rows: list[Row]) -> float:
    """The share of prompt tokens that were not computed."""
    taken = sum(row["num_cached_tokens"] + row["num_reused_tokens"] for row in rows)
    return taken / sum(row["num_prompt_tokens"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions")
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--actors", type=int, default=1, help="engines")
    parser.add_argument("--gpus-per-actor", type=float, default=0, help="0: on the CPU")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ratio", type=float, default=0.05, help="share of a reused picture's tokens to recompute")
    parser.add_argument("--no-affinity", action="store_true", help="questions go to any engine, to compare")
    args = parser.parse_args()
    rows: list[Row] = []
    with args.answers.open("w", encoding="utf-8") as file:
        for row in answers(args.questions, args.model, args.actors, affinity=not args.no_affinity,
                           max_tokens=args.max_tokens, num_gpus=args.gpus_per_actor,
                           options={"recompute_ratio": args.ratio,
                                    "device": "cuda" if args.gpus_per_actor else "cpu"}):
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
    print(f"{len(rows)} answers by {len({row['actor'] for row in rows})} engines; "
          f"{reuse_share(rows):.1%} of the prompt tokens were reused")


if __name__ == "__main__":
    main()
