"""Keeps what a training run has reached in files small enough to travel, and takes it up again."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MAX_FILE_BYTES = 15 * 1024**2


@dataclass
class Progress:
    """How far all legs together have come."""

    step: int = 0
    seconds: float = 0.0
    leg: int = 0


def save(folder: Path, module: nn.Module, progress: Progress) -> None:
    """Weights in float32, in several files. The optimizer's moments, twice as large, stay behind: with decays of 0.9
    and 0.98 they are there again after some dozen steps, while the learning rate still rises."""
    tensors = {name: value for name, value in module.state_dict().items() if "lm_head" not in name}
    tensors["progress"] = torch.tensor([progress.step, progress.seconds, progress.leg], dtype=torch.float64)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("state-*.safetensors"):
        old.unlink()
    for number, part in enumerate(_parts(tensors)):
        save_file(part, folder / f"state-{number}.safetensors")


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(other.nbytes for other in parts[-1].values()) + tensor.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = tensor.detach().cpu().contiguous()
    return parts


def resume(folder: Path, module: nn.Module) -> Progress:
    """Fills the module from `save`'s files; a fresh `Progress` where there are none."""
    files = sorted(folder.glob("state-*.safetensors"))
    if not files:
        return Progress()
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    step, seconds, leg = tensors["progress"].tolist()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[name])
    return Progress(int(step), seconds, int(leg))
