"""Measures throughput, latency and the cost of a picture that comes back, beside the floor of the device.

    python bench.py                                     256 requests of 100..1024 tokens in and out
    python bench.py --mode latency                      batches of 1, 8 and 32
    python bench.py --mode image --size 3b              a 3840x2160 picture, cold and warm, at several ratios
    python bench.py --size 8b --tp 2                    the model shared by two GPUs
    python bench.py --size 0.6b --num-seqs 8 --max-input 200 --max-output 100 --compare transformers

The model is --model, or --size (a published size with random weights), or the one in ~/huggingface, or a small demo.
"""
from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks import generation, host_time, image, peers, report
from benchmarks.floors import Ceilings, measure_ceilings
from benchmarks.models import TEXT_MODEL, VISION_MODEL, ModelFolder, open_model
from benchmarks.published import SIZES
from benchmarks.report import Result
from benchmarks.transformers_peer import TransformersPeer
from nanovllm import LLM
from nanovllm.attention import select_backend
from nanovllm.config import Config
from nanovllm.engine.model_runner import pick_device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("text", "latency", "image"), default="text")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="folder or hub id")
    model.add_argument("--size", choices=sorted(SIZES), help="a published size, with random weights")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--dtype", default="auto", help="of weights and KV; auto: as the checkpoint says")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model (tensor_parallel_size)")
    parser.add_argument("--vision-parallel", choices=("split", "data"), default="split",
                        help="ranks share each picture, or each encodes other pictures")
    parser.add_argument("--compare", type=peers.parse_peers, default=[], metavar="PEER,PEER",
                        help=f"run the same work through peers, too, of {', '.join(peers.PACKAGES)} those that are "
                             "installed; pictures through transformers alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="text: one run each")
    parser.add_argument("--num-seqs", type=int, help="requests; default: text 256, latency 1, 8 and 32")
    parser.add_argument("--max-input", type=int, help="longest prompt (text, default 1024); each prompt (latency, 100)")
    parser.add_argument("--max-output", type=int, help="longest output (text, default 1024); each (latency, 512)")
    parser.add_argument("--picture", default="3840x2160", metavar="WxH", help="image: size in pixels")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.1, 0.05, 0.02], help="image")
    parser.add_argument("--repeats", type=int, default=5, help="image: calls for each median")
    parser.add_argument("--named", action="store_true", help="image: the caller names the picture; nothing is hashed")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.add_argument("--commit", help="of the tree that is measured; default: what git says")
    return parser.parse_args(argv)


def works(args: argparse.Namespace, vocab_size: int) -> list[tuple[int | None, generation.Work]]:
    """(seed, work) of each run of the text and latency modes."""
    if args.mode == "text":
        num_seqs, max_input, max_output = (given or full for given, full in zip(
            (args.num_seqs, args.max_input, args.max_output), generation.FULL_SIZE))
        return [(seed, generation.throughput_work(seed, num_seqs, max_input, max_output, vocab_size))
                for seed in args.seeds]
    batches = generation.LATENCY_BATCHES if args.num_seqs is None else [args.num_seqs]
    lengths = args.max_input or generation.LATENCY_INPUT, args.max_output or generation.LATENCY_OUTPUT
    return [(None, generation.latency_work(num_seqs, *lengths, vocab_size)) for num_seqs in batches]


def run_generation(args: argparse.Namespace, folder: ModelFolder, llm: LLM, ceilings: Ceilings) -> list[Result]:
    todo = works(args, llm.tokenizer.vocab_size)
    results = [generation.measure(llm, work, args.mode, ceilings, seed) for seed, work in todo]
    if args.mode == "text":
        print(f"host, {host_time.NUM_SEQS} requests decoding, device stubbed: {host_time.decode_host_ms(llm):.2f} ms "
              f"from a result to the next launch (median)")
    device, dtype = llm.runner.device, llm.runner.dtype
    llm.exit()
    for name in peers.installed(args.compare):
        peer = TransformersPeer(folder, device, dtype) if name == "transformers" else peers.ProcessPeer(name, folder)
        results += peer.measure(todo, args.mode)
    return results


def run_image(args: argparse.Namespace, folder: ModelFolder, llm: LLM, ceilings: Ceilings) -> list[Result]:
    width, height = map(int, args.picture.split("x"))
    config = llm.config.model_config
    if config.vision is None:
        raise SystemExit(f"--mode image needs a vision-language model, not {folder.name}: give --size 3b or --model")
    work = image.ImageWork(config, llm.tokenizer.vocab_size, width, height, args.named)
    print(f"picture {args.picture}: {work.num_tokens:,} tokens, grid {work.grid}")
    results = image.measure(llm, work, args.ratios, args.repeats, ceilings)
    device, dtype = llm.runner.device, llm.runner.dtype
    llm.exit()
    if "transformers" in peers.installed(args.compare):
        peer = TransformersPeer(folder, device, dtype)
        results.append(peer.measure_image(work.prompt(before=1, behind=2), work.mm_inputs, args.mode, args.repeats))
    return results


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    published = VISION_MODEL if args.mode == "image" else TEXT_MODEL
    with open_model(args.model, args.size, published) as folder:
        options = dict(device=args.device, dtype=args.dtype, attention_backend=args.backend,
                       tensor_parallel_size=args.tp, vision_parallel=args.vision_parallel, **folder.options)
        dtype, device = getattr(torch, Config(folder.path, **options).dtype), pick_device(args.device)
        ceilings = measure_ceilings(device, dtype, args.tp, args.tp if args.vision_parallel == "split" else 1)
        print(f"{report.device_name(device)}: copies {ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
              f"multiplies {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s in {dtype}")
        if ceilings.ranks > 1:
            print(f"copies to the next GPU {ceilings.fabric_bytes_per_second / 1e9:,.0f} GB/s")
        start = perf_counter()
        llm = LLM(folder.path, **options)
        print(f"ready after {perf_counter() - start:.1f} s; {llm.runner.graph_cost or 'no CUDA graphs'}")
        results = (run_image if args.mode == "image" else run_generation)(args, folder, llm, ceilings)
        backend = type(select_backend(args.backend, device, dtype)).__name__.removesuffix("Backend").lower()
        setting = report.setting_of(folder.name, folder.weights, device, backend, args.commit)
        if args.tp > 1:
            pictures = f", vision {args.vision_parallel}" * (args.mode == "image")
            setting = replace(setting, device=f"{args.tp} ranks{pictures} on {setting.device}")
    report.print_report(setting, results)
    if args.plot:
        report.plot(setting, results, args.plot)


if __name__ == "__main__":
    main()
