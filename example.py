"""Asks a Qwen2.5-VL questions about one picture: new, again, and inside another prompt, where its KV is reused.

    python example.py [--model DIR] [--image FILE] [--ratio 0.05] [--max-tokens 32]
"""
from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

from benchmarks.models import ModelFolder, open_model
from benchmarks.pictures import draw_shapes
from nanovllm import LLM, SamplingParams

GUIDE = ("You look at drawings that children sent in. Describe shapes, colours and places in short, plain sentences; "
         "name each shape once, from left to right, and do not guess what a drawing means.")
QUESTIONS = [       # (what is new, system text before the picture, question behind it)
    ("a new picture", None, "Which shapes are in the picture?"),
    ("the same picture, another question", None, "Which colour has the largest shape?"),
    ("the same picture, other text before it", GUIDE, "Which shapes are in the picture?"),
]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default ~/huggingface/Qwen2.5-VL-3B-Instruct, else a demo")
    parser.add_argument("--image", type=Path, help="a picture file; default: one drawn here")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of a reused picture's tokens to recompute")
    parser.add_argument("--max-tokens", type=int, default=32)
    return parser.parse_args()


def ask(llm: LLM, processor: ProcessorMixin, picture: Path, system: str | None, question: str, max_tokens: int) -> None:
    """One question about the picture file, and what answering it took."""
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    [output] = llm.generate(inputs["input_ids"].tolist(), SamplingParams(max_tokens=max_tokens, top_k=1),
                            mm_inputs=[inputs], use_tqdm=False)
    print(f"  question  {question}\n  answer    {output['text']!r}")
    print(f"  ttft {output['ttft'] * 1e3:.1f} ms   vit_time {output['vit_time'] * 1e3:.1f} ms   "
          f"prompt {output['num_prompt_tokens']} tokens   num_cached_tokens {output['num_cached_tokens']}   "
          f"num_reused_tokens {output['num_reused_tokens']}\n")


def run(model: ModelFolder, picture: Path, ratio: float, max_tokens: int) -> None:
    processor = AutoProcessor.from_pretrained(model.path)
    with LLM(model.path, recompute_ratio=ratio) as llm:
        for news, system, question in QUESTIONS:
            print(f"{news}:")
            ask(llm, processor, picture, system, question, max_tokens)


def main() -> None:
    args = parse_args()
    with open_model(args.model) as model, TemporaryDirectory(prefix="nanovllm-") as folder:
        picture = args.image
        if picture is None:
            picture = Path(folder, "picture.png")
            draw_shapes(640, 480).save(picture)
        print(f"model: {model.name}   picture: {picture}   recompute_ratio: {args.ratio}\n")
        run(model, picture, args.ratio, args.max_tokens)
        if model.weights == "demo":
            print("This was the demo model: its weights are random, so its answers mean nothing. Times and counts are "
                  "real.\nGive a checkpoint with --model DIR.")


if __name__ == "__main__":
    main()
