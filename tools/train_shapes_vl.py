"""Trains the small model of assets/shapes-vl, one leg of so many seconds after the other.

    python -m tools.train_shapes_vl --out FOLDER --checkpoint FOLDER --seconds 450 --total-seconds 900 [--device cuda]

A leg takes up the checkpoint where there is one and writes it again at its end, with the model's folder. Pictures are
painted on the device, questions invented in worker processes. Log lines: leg, step, seconds of all legs, loss of the
answers, of the read-outs of what cells show and where they lie, learning rate, pictures seen; then held-out accuracy by
kind, with the pictures and with grey ones in their place.
"""
from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nanovllm.quality.shapes import COLOURS, KINDS, SHAPES, held_out, without_pictures
from tools.shapes.batches import Batch, Encoder, batches, batches_of, conversation_of
from tools.shapes.folder import make_tokenizer, new_model, save_weights, write_folder
from tools.shapes.packed import PackedModel, learning_rate, losses, right_by_kind
from tools.shapes.progress import Progress, resume, save

READ_OUT_WEIGHT = 0.5       # of the read-outs' losses, in the first leg only


class Batches(IterableDataset[bytes]):
    """Pickled training batches; every worker of every leg draws others. As bytes they come through a pipe, where
    tensors would need more shared memory than some machines have."""

    def __init__(self, num_rows: int, num_vision_rows: int, seed: str) -> None:
        self.num_rows, self.num_vision_rows, self.seed = num_rows, num_vision_rows, seed

    def __iter__(self) -> Iterator[bytes]:
        worker = get_worker_info()
        torch.set_num_threads(1)
        return map(pickle.dumps, batches(Encoder(make_tokenizer()), self.num_rows, self.num_vision_rows,
                                         f"{self.seed} {worker.id if worker else 0}"))


@dataclass(frozen=True)
class Exam:
    """Held-out batches, with pictures and with grey ones."""

    batches: tuple[list[Batch], list[Batch]]

    @classmethod
    def of(cls, num_per_kind: int, num_rows: int, num_vision_rows: int) -> Exam:
        asked, encoder = list(held_out(num_per_kind)), Encoder(make_tokenizer())
        seen, grey = (batches_of(encoder, [conversation_of(each) for each in questions], num_rows, num_vision_rows)
                      for questions in (asked, map(without_pictures, asked)))
        return cls((seen, grey))

    @torch.inference_mode()
    def log(self, run: Run) -> None:
        for name, group in zip(("held-out", "grey    "), self.batches):
            counts = sum(right_by_kind(run.forward(batch)[0], run.on_device(batch), len(KINDS)).cpu()
                         for batch in group)
            assert isinstance(counts, torch.Tensor)
            shares = (counts[:, 0] / counts[:, 1].clamp(min=1)).tolist()
            kinds = "  ".join(f"{kind} {share:.3f}" for kind, share in zip(KINDS, shares))
            print(f"  {name} {int(counts[:, 0].sum()) / int(counts[:, 1].sum()):.3f}  {kinds}", flush=True)


class Run:
    """The model in training on its device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.model = new_model(args.out, args.seed)
        self.packed = PackedModel(self.model, len(COLOURS) * len(SHAPES) + 1).to(self.device)
        decayed = [weight for weight in self.packed.parameters() if weight.dim() > 1]
        others = [weight for weight in self.packed.parameters() if weight.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.05)
        self.progress = resume(args.checkpoint, self.packed)
        self.progress.leg += 1
        self.read_out_weight = READ_OUT_WEIGHT if self.progress.leg == 1 else 0.0
        if args.compile:
            self.packed.compile_layers()

    def on_device(self, batch: Batch) -> Batch:
        return batch.to(self.device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.packed(self.on_device(batch))

    def step(self, batch: Batch, rate: float) -> torch.Tensor:
        """Losses of answers, cells and spots of one step, still on the device."""
        batch = self.on_device(batch)
        answers, cells, spots = losses(*self.forward(batch), batch)
        (answers + self.read_out_weight * (cells + spots)).backward()
        torch.nn.utils.clip_grad_norm_(self.packed.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.step += 1
        return torch.stack((answers, cells, spots)).detach()


def train(run: Run, loader: Iterator[Batch], exam: Exam, args: argparse.Namespace) -> None:
    """One leg of `args.seconds`, exams and compiling included."""
    progress: Progress = run.progress
    start, before, pictures, next_exam = perf_counter(), progress.seconds, 0, args.exam_every
    first_step = progress.step
    deadline = start + args.seconds
    while perf_counter() < deadline:
        rate = learning_rate(progress.seconds, args.total_seconds, progress.step - first_step, args.rate)
        batch = next(loader)
        step_losses = run.step(batch, rate)
        pictures += len(batch.scenes.cells)
        progress.seconds = before + perf_counter() - start
        if progress.step % args.log_every == 0:
            answers, cells, spots = step_losses.tolist()
            print(f"leg {progress.leg}  step {progress.step}  {progress.seconds:.0f} s  loss {answers:.3f}  "
                  f"cells {cells:.3f}  spots {spots:.3f}  lr {rate:.2e}  pictures {pictures}", flush=True)
        if progress.seconds - before >= next_exam:
            exam.log(run)
            next_exam += args.exam_every


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--checkpoint", type=Path, required=True, help="where a leg hands over to the next")
    parser.add_argument("--size", choices=("shipped", "tiny"), default="shipped")
    parser.add_argument("--seconds", type=float, default=450, help="of this leg, exams and compiling included")
    parser.add_argument("--total-seconds", type=float, default=900, help="of all legs: the learning rate's course")
    parser.add_argument("--rate", type=float, default=7e-4,
                        help="highest learning rate; 2e-3 drives attention onto single tokens, and nothing is learnt")
    parser.add_argument("--rows", type=int, default=48, help="rows of 1024 tokens a step")
    parser.add_argument("--vision-rows", type=int, default=112, help="rows of 576 patches a step")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--exam", type=int, default=200, help="held-out questions of each kind")
    parser.add_argument("--exam-every", type=float, default=120, help="seconds")
    parser.add_argument("--log-every", type=int, default=100, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")     # else its pool starts processes beside our workers
    torch.set_float32_matmul_precision("high")
    write_folder(args.out, args.size)
    run = Run(args)
    data = Batches(args.rows, args.vision_rows, f"{args.seed} {run.progress.leg}")
    options = dict(num_workers=args.workers, multiprocessing_context="spawn") if args.workers else {}
    loader = map(pickle.loads, DataLoader(data, batch_size=None, **options))
    exam = Exam.of(args.exam, args.rows, args.vision_rows)
    print(f"{sum(weight.numel() for weight in run.model.parameters()) / 1e6:.2f} M parameters, leg "
          f"{run.progress.leg}", flush=True)
    try:
        train(run, loader, exam, args)
    finally:
        save(args.checkpoint, run.packed, run.progress)
        save_weights(run.model, args.out)
    exam.log(run)


if __name__ == "__main__":
    main()
