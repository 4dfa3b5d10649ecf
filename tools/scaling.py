"""Works out what tensor parallelism asks of each rank, and how image affinity behaves as engines come and go.

    python tools/scaling.py tables
    python tools/scaling.py floors
    python tools/scaling.py affinity [--plot docs/affinity.png]

Nothing is measured: sizes are counted on models without memory, and the cluster is simulated.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.floors import Ceilings, generation_floors, image_call_floor
from benchmarks.generation import throughput_work
from benchmarks.published import SIZES
from nanovllm.attention import select_backend
from nanovllm.config import check_ranks
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import ARCHITECTURES
from nanovllm.parallel import TensorParallel

BYTES = 2                       # of a bfloat16
RANKS = (1, 2, 4, 8)
BATCH = 256                     # sequences of a decode step
GRID = (1, 154, 274)            # of a 3840 x 2160 picture
PATCHES = math.prod(GRID)       # of it in the vision tower
ROWS = PATCHES // 4             # behind the tower, which merges squares of four
TEXT = 42                       # tokens around it in the prompt of `bench.py --mode image`
# Copies and products as docs/log.md has them of an H200; NVLink each way as its maker has it.
H200 = Ceilings(bytes_per_second=4.15e12, flops_per_second=838e12)
NVLINK = 450e9                  # bytes a second

# ---------------------------------------------------------------- tensor parallelism


def model_config(size: str) -> ModelConfig:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SIZES[size][1]))
        return ModelConfig.from_folder(folder)


def num_parameters(config: ModelConfig, parallel: TensorParallel) -> int:
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config, select_backend("torch", "cpu"), parallel)
    return sum(parameter.numel() for parameter in model.parameters())


def sent_by_sum(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends for the sum of a tensor."""
    return 2 * (ranks - 1) / ranks * num_bytes


def table_row(config: ModelConfig, ranks: int) -> str:
    text, parallel = config.text, TensorParallel(0, ranks)
    kv_token = 2 * text.num_layers * parallel.num_kv_heads(text.num_kv_heads) * text.head_dim * BYTES
    sums = 2 * text.num_layers + 1                              # attention, feed-forward; the embedding
    decode = sums * sent_by_sum(BATCH * text.hidden_size * BYTES, ranks)
    logits = BATCH * parallel.split(text.vocab_size).size * BYTES if ranks > 1 else 0
    cells = [f"{ranks}", f"{num_parameters(config, parallel) * BYTES / 2**30:.2f}", f"{kv_token / 1024:.0f}",
             f"{sums if ranks > 1 else 0}", f"{decode / 1e6:.0f}", f"{logits / 1e6:.1f}"]
    if config.vision is not None:
        split = (2 * config.vision.depth * sent_by_sum(PATCHES * config.vision.hidden_size * BYTES, ranks)
                 + sent_by_sum(ROWS * text.hidden_size * BYTES, ranks))
        data = ROWS * text.hidden_size * BYTES if ranks > 1 else 0
        cells += [f"{split / 1e9:.2f}", f"{data / 1e9:.3f}"]
    return " | ".join(cells)


def print_tables() -> None:
    for size, (name, _) in SIZES.items():
        config = model_config(size)
        head = ["ranks", "weights GiB", "KV KiB a token", "sums a step", f"sent in sums, {BATCH} decodes, MB",
                "logits a rank sends, MB"]
        if config.vision is not None:
            head += ["4K picture, split, GB", "4K picture, data, GB"]
        print(f"\n{name}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        for ranks in RANKS:
            try:
                check_ranks(ranks, "split", config)
            except ValueError as error:
                print(f"| {ranks} | {str(error).partition(': ')[2].partition(';')[0]}" + " |" * (len(head) - 1))
            else:
                print(f"| {table_row(config, ranks)} |")


# ---------------------------------------------------------------- floors

# What benchmarks/two_gpus.py runs: (requests, longest prompt, longest output), seed 0.
TEXT_RUNS = {"0.6b": (256, 1024, 1024), "8b": (128, 512, 256), "32b": (128, 512, 256)}
RATIOS = (1.0, 0.05)            # of a picture's rows that are computed; at 1.0 the tower runs, too


def ceilings(ranks: int, vision_ranks: int = 1) -> Ceilings:
    """Of H200s on NVLink."""
    return replace(H200, ranks=ranks, vision_ranks=vision_ranks, fabric_bytes_per_second=NVLINK)


def print_floors() -> None:
    parts = ("prompts", "weights", "KV", "sums", "logits")
    print(f"| model | requests | ranks | {', s | '.join(parts)}, s | all, s | output tok/s | against one rank |")
    print("|---" * 11 + "|")
    for size, shape in TEXT_RUNS.items():
        name, config, alone = SIZES[size][0], model_config(size), 0.0
        work = throughput_work(0, *shape, config.text.vocab_size)
        for ranks in (1, 2):
            floors = generation_floors(config, BYTES, [len(prompt) for prompt in work.prompts], work.output_lens,
                                       ceilings(ranks))
            seconds = sum(floors.values())
            alone = alone or seconds
            print(f"| {name} | {shape[0]} | {ranks} | {' | '.join(f'{floors[part]:.2f}' for part in parts)} | "
                  f"{seconds:.2f} | {work.num_output_tokens / seconds:,.0f} | {alone / seconds:.2f} x |")
    print("\n| Qwen2.5-VL-7B-Instruct, a 4K picture | ranks | tower | cold, ms | warm and moved at 0.05, ms |")
    print("|---" * 5 + "|")
    for ranks, vision_ranks in ((1, 1), (2, 2), (2, 1)):
        calls = [picture_floor(ratio, ceilings(ranks, vision_ranks)) for ratio in RATIOS]
        tower = "whole" if vision_ranks == 1 else "split"
        print(f"| to the first token | {ranks} | {tower} | {' | '.join(f'{1e3 * call:.1f}' for call in calls)} |")


def picture_floor(ratio: float, device: Ceilings) -> float:
    computed = math.ceil(ratio * ROWS)
    return image_call_floor(model_config("7b"), BYTES, ROWS + TEXT, computed + TEXT, ROWS - computed,
                            [GRID] if ratio == 1 else [], device)


# ---------------------------------------------------------------- affinity

Route = Callable[[int, Sequence[int], random.Random], int]      # (picture, engines, dice) -> engine
NUM_PICTURES, NUM_REQUESTS, CACHED_PICTURES, WINDOW = 4000, 60000, 600, 1000
START, DIES, JOIN = 8, NUM_REQUESTS // 3, 2 * NUM_REQUESTS // 3     # engines; when one dies; when two join


def weight(picture: int, engine: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{picture} {engine}".encode(), digest_size=8).digest(), "big")


ROUTES: dict[str, Route] = {
    "any engine": lambda picture, engines, dice: dice.choice(engines),
    "hash modulo the number of engines": lambda picture, engines, dice: engines[weight(picture, 0) % len(engines)],
    "rendezvous hash": lambda picture, engines, dice: max(engines, key=lambda engine: weight(picture, engine)),
}


def simulate(route: Route) -> Iterator[bool]:
    """For each request whether its picture was in the cache of the engine that it went to; pictures are asked for with
    a frequency of 1 / rank (Zipf), each engine keeps the `CACHED_PICTURES` last used."""
    dice = random.Random(0)
    frequencies = [1 / (rank + 1) for rank in range(NUM_PICTURES)]
    caches: dict[int, OrderedDict[int, None]] = {engine: OrderedDict() for engine in range(START)}
    for number, picture in enumerate(dice.choices(range(NUM_PICTURES), frequencies, k=NUM_REQUESTS)):
        if number == DIES:
            del caches[2]
        if number == JOIN:
            caches |= {START: OrderedDict(), START + 1: OrderedDict()}
        cache = caches[route(picture, sorted(caches), dice)]
        yield picture in cache
        cache[picture] = None
        cache.move_to_end(picture)
        if len(cache) > CACHED_PICTURES:
            cache.popitem(last=False)


def shares(hits: Sequence[bool]) -> list[float]:
    return [sum(hits[start:start + WINDOW]) / WINDOW for start in range(0, NUM_REQUESTS, WINDOW)]


def run_affinity(plot: Path | None) -> None:
    series = {name: shares(list(simulate(route))) for name, route in ROUTES.items()}
    dies, joins = DIES // WINDOW, JOIN // WINDOW
    print("| requests go to | before | just after a death | settled | just after two joined | settled |")
    print("|---" * 6 + "|")
    for name, values in series.items():
        moments = (values[dies - 1], values[dies], values[joins - 1], values[joins], values[-1])
        print(f"| {name} | {' | '.join(f'{value:.1%}' for value in moments)} |")
    if plot is not None:
        draw(series, plot)


def draw(series: dict[str, list[float]], file: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, values in series.items():
        axes.plot([WINDOW * (i + 0.5) for i in range(len(values))], values, label=name)
    for when, what in ((DIES, "one engine of eight dies"), (JOIN, "two join")):
        axes.axvline(when, color="grey", linestyle=":")
        axes.text(when, 0.02, f" {what}", color="grey")
    axes.set(xlabel="requests", ylabel="share whose picture was cached", ylim=(0, 1))
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.08))
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "floors", "affinity"))
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="affinity: draw the shares over time")
    args = parser.parse_args()
    if args.what == "tables":
        print_tables()
    elif args.what == "floors":
        print_floors()
    else:
        run_affinity(args.plot)


if __name__ == "__main__":
    main()
