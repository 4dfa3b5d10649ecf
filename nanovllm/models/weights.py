"""Fills a model from safetensors, every parameter exactly once and no tensor unused, or with random numbers."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanovllm.layers.linear import MergedLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import CausalLM

# Buffers that older exporters saved; the values follow from the config.
SKIPPED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
DUMMY_SCALE = 0.02
NAMES_SHOWN = 8


def load_weights(model: CausalLM, path: str | Path) -> None:
    """Copies the checkpoint in folder `path` into `model`, tensor by tensor, converted to each parameter's dtype.

    Raises FileNotFoundError if the folder has no safetensors or lacks a file of its index, and ValueError, with the
    names, if a parameter is missing or stored twice, a tensor belongs to no parameter, a shape differs, or a tied
    model's stored lm_head is not its embedding.
    """
    destinations = _destinations(model)
    missing, unknown = set(destinations), []
    tied_head: Tensor | None = None
    for stored_name, tensor in _stored_tensors(Path(path)):
        name = _renamed(stored_name, model)
        if name == "lm_head.weight" and model.lm_head is None:
            tied_head = tensor
        elif name in destinations:
            if name not in missing:
                raise ValueError(f"{path}: {name} is stored twice; remove one of the files or names")
            _copy(stored_name, tensor, destinations[name])
            missing.remove(name)
        elif not name.endswith(SKIPPED_SUFFIXES):
            unknown.append(stored_name)
    if missing:
        raise ValueError(f"{path} lacks {_some(missing)}; check that all files of the checkpoint are there "
                         "and that config.json (biases, tie_word_embeddings, layers) belongs to it")
    if unknown:
        raise ValueError(f"{path} has tensors that no parameter takes: {_some(unknown)}; "
                         "check that config.json belongs to it")
    if tied_head is not None:
        _check_tied(tied_head, model.model.embed_tokens.weight, path)


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random parameters of scale 0.02 and norm weights of 1, drawn on the device where the parameters are."""
    generators: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1)
                continue
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            parameter.normal_(0, DUMMY_SCALE, generator=generators[device])


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything in the checkpoint, one tensor in memory at a time."""
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                yield name, tensors.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    """The files of the index if there is one, else model.safetensors."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = [single]
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    if absent := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{folder} lacks {_some(absent)}; download the whole checkpoint, as safetensors, "
                                "or pass load_format='dummy' for random weights")
    return files


def _renamed(name: str, model: CausalLM) -> str:
    for stored, ours in model.checkpoint_prefixes:
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name


def _destinations(model: nn.Module) -> dict[str, Tensor]:
    """Every name a checkpoint may hold, and the (view of a) parameter it fills; merged parameters have several."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                views = parameter.split(tuple(module.parts.values()))
                found |= {f"{parent}.{part}.{name}": view for part, view in zip(module.parts, views)}
            else:
                found[f"{path}.{name}"] = parameter
    return found


def _copy(name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(f"{name} has shape {list(source.shape)} in the checkpoint but {list(target.shape)} by "
                         "config.json; one of them belongs to another model")
    target.copy_(source)


def _check_tied(head: Tensor, embedding: Tensor, path: str | Path) -> None:
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise ValueError(f"{path}: config.json ties the head to the embedding, but the stored lm_head.weight differs "
                         "from it; set tie_word_embeddings to false to use the stored head")


def _some(names: set[str] | list[str]) -> str:
    shown = sorted(names)[:NAMES_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
