"""Asks the shapes model its held-out questions in transformers and in nanovllm, and compares the greedy answers.

    python -m tools.check_shapes_vl FOLDER [--per-kind 200] [--device cuda] [--dtype bfloat16] [--grey]
"""
from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Qwen2_5_VLForConditionalGeneration

from nanovllm import LLM, SamplingParams
from nanovllm.quality.measure import is_right
from nanovllm.quality.prompts import Inputs, Prompts
from nanovllm.quality.questions import Question, builtin_questions
from nanovllm.quality.shapes import KINDS

MAX_TOKENS = 8
WANTED_AGREEMENT = 0.99


class Peer:
    """transformers, one question at a time."""

    def __init__(self, folder: str, device: str, dtype: str) -> None:
        model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.device, self.model = device, model.to(device).eval()

    @torch.inference_mode()
    def answer(self, inputs: Inputs) -> list[int]:
        on_device = {name: value.to(self.device) for name, value in inputs.items()}
        ids = self.model.generate(**on_device, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        return ids[inputs["input_ids"].shape[1]:].tolist()


def ask_both(peer: Peer, llm: LLM, questions: list[Question]) -> dict[str, list[tuple[bool, bool, bool]]]:
    """By kind, for each question: transformers is right, nanovllm is right, their ids are equal."""
    prompts = Prompts(llm.config.model_config)
    params = SamplingParams(max_tokens=MAX_TOKENS, top_k=1)
    marks: dict[str, list[tuple[bool, bool, bool]]] = defaultdict(list)
    for question in tqdm(questions):
        inputs = prompts.asking(question)
        theirs = peer.answer(inputs)
        [output] = llm.generate(inputs["input_ids"].tolist(), params, [inputs], use_tqdm=False)
        text = str(llm.tokenizer.decode(theirs, skip_special_tokens=True))
        marks[question.kind].append((is_right(text, str(question.answer)),
                                     is_right(output["text"], str(question.answer)), theirs == output["token_ids"]))
    return marks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--grey", action="store_true", help="show grey pictures: what can be guessed")
    args = parser.parse_args(argv)
    questions = list(builtin_questions(args.per_kind))
    if args.grey:
        questions = [replace(each, pictures=tuple(replace(scene, grey=True) for scene in each.pictures))
                     for each in questions]
    peer = Peer(args.folder, args.device, args.dtype)
    with LLM(args.folder, device=args.device, dtype=args.dtype, gpu_memory_utilization=0.3) as llm:
        marks = ask_both(peer, llm, questions)
    marks["all"] = [mark for kind in KINDS for mark in marks[kind]]
    print(f"{'':16}{'transformers':>14}{'nanovllm':>10}{'equal':>8}")
    for kind, own in marks.items():
        shares = [sum(column) / len(own) for column in zip(*own)]
        print(f"{kind:<16}{shares[0]:>14.3f}{shares[1]:>10.3f}{shares[2]:>8.3f}")
    return 0 if shares[2] >= WANTED_AGREEMENT else 1


if __name__ == "__main__":
    sys.exit(main())
