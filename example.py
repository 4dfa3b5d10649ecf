"""Asks a Qwen2.5-VL questions about a picture of shapes: new, again, and inside other prompts, where its KV is reused.

    python example.py [--model DIR] [--image FILE] [--ratio 0.05] [--seed 0]
"""
from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

from benchmarks.models import SHAPES_MODEL
from nanovllm import LLM, SamplingParams
from nanovllm.quality.pictures import draw
from nanovllm.quality.shapes import EMPTY, Scene, ask, distracting_text, draw_scene, name_of


@dataclass(frozen=True)
class Turn:
    """One question, what the scenes say the answer is, and what is new about the prompt."""

    news: str
    question: str
    expected: str
    pictures: tuple[str, ...] = ("picture",)
    system: str | None = None


def turns_about(rng: random.Random, scene: Scene, other: Scene) -> list[Turn]:
    """Questions that need the picture, each in another prompt."""
    def about(news: str, kind: str, *scenes: Scene, system: str | None = None) -> Turn:
        while (asked := ask(rng, kind, scenes)) is None:
            pass
        return Turn(news, *asked, ("picture", "other")[:len(scenes)], system)

    return [about("a new picture", "position", scene),
            about("the same picture, another question", "count", scene),
            about("the same picture, other text before it", "only", scene, system=distracting_text(rng, 12)),
            about("the same picture, a new one behind it", "two images", scene, other)]


def answer(llm: LLM, processor: ProcessorMixin, turn: Turn, files: dict[str, Path], max_tokens: int) -> None:
    """One question, its answer, and what answering took."""
    content = [{"type": "image", "image": Image.open(files[name])} for name in turn.pictures]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": turn.question}]}]
    if turn.system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": turn.system}]})
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    [output] = llm.generate(inputs["input_ids"].tolist(), SamplingParams(max_tokens=max_tokens, top_k=1),
                            mm_inputs=[inputs], use_tqdm=False)
    print(f"{turn.news}:\n  ttft {output['ttft'] * 1e3:.1f} ms   vit_time {output['vit_time'] * 1e3:.1f} ms   "
          f"prompt {output['num_prompt_tokens']} tokens   num_cached_tokens {output['num_cached_tokens']}   "
          f"num_reused_tokens {output['num_reused_tokens']}\n"
          f"  question  {turn.question}\n  answer    {output['text']}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPES_MODEL), help="folder or hub id; default: the one in assets/")
    parser.add_argument("--image", type=Path, help="a picture file of your own; default: shapes, painted here")
    parser.add_argument("--ratio", type=float, default=0.05, help="share of a reused picture's tokens to recompute")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the shapes and the questions")
    return parser.parse_args()


def describe(scene: Scene) -> str:
    """What is to be seen, row by row."""
    names = ["nothing" if cell == EMPTY else name_of(cell) for cell in scene.cells]
    rows = [", ".join(names[start:start + scene.cols]) for start in range(0, len(names), scene.cols)]
    return f"{scene.width}x{scene.height} pixels\n  " + "\n  ".join(rows)


def main() -> None:
    args = parse_args()
    rng = random.Random(f"example {args.seed}")
    scenes = {name: draw_scene(rng, max_side=3) for name in ("picture", "other")}
    with TemporaryDirectory(prefix="nanovllm-") as folder:
        files = {name: Path(folder, f"{name}.png") for name in scenes}
        for picture, file in zip(draw(list(scenes.values())), files.values()):
            Image.fromarray(picture.numpy()).save(file)
        files["picture"] = args.image or files["picture"]
        print(f"model: {Path(args.model).name}   recompute_ratio: {args.ratio}\n"
              f"picture: {args.image or describe(scenes['picture'])}\n")
        processor = AutoProcessor.from_pretrained(args.model)
        with LLM(args.model, recompute_ratio=args.ratio) as llm:
            for turn in turns_about(rng, *scenes.values()):
                answer(llm, processor, turn, files, args.max_tokens)
                print(f"  expected  {turn.expected}\n" if args.image is None else "")


if __name__ == "__main__":
    main()
