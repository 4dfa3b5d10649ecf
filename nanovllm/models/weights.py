"""Fills a model from safetensors, every parameter exactly once and no tensor unused, or with random numbers."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.linear import ColumnLinear, MergedLinear, RowLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.models.decoder import CausalLM
from nanovllm.parallel import Part

# Buffers that older exporters saved; the values follow from the config.
SKIPPED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
DUMMY_SCALE = 0.02
NAMES_SHOWN = 8


@dataclass(frozen=True)
class Destination:
    """Where a tensor of a checkpoint goes: each part of it (one slice an axis) fills a view of a parameter.

    A view may reach further than its part; there it is zero. What belongs to other ranks is in no part.
    """

    shape: tuple[int, ...]                                          # of the whole tensor
    parts: tuple[tuple[tuple[slice, ...], Tensor], ...]
    is_norm: bool

    def fill(self, source: Any) -> None:
        """From a tensor, or anything of its shape that gives one for slices: read is only what this rank keeps."""
        for part, view in self.parts:
            kept = source[part]
            if kept.shape != view.shape:
                view.zero_()
                view = view[tuple(map(slice, kept.shape))]
            view.copy_(kept)


def load_weights(model: CausalLM, path: str | Path) -> None:
    """Copies this rank's share of the checkpoint in folder `path` into `model`, converted to each parameter's dtype.

    Raises FileNotFoundError if the folder has no safetensors or lacks a file of its index, and ValueError, with the
    names, if a parameter is missing or stored twice, a tensor belongs to no parameter, a shape differs, or a tied
    model's stored lm_head is not its embedding.
    """
    destinations = destinations_of(model)
    missing, unknown = set(destinations), []
    for stored_name, stored in _stored_tensors(Path(path)):
        name = _renamed(stored_name, model)
        if name == "lm_head.weight" and model.lm_head is None:
            pass                # compared below, once the embedding is there
        elif name in destinations:
            if name not in missing:
                raise ValueError(f"{path}: {name} is stored twice; remove one of the files or names")
            _fill(stored_name, stored, destinations[name])
            missing.remove(name)
        elif not name.endswith(SKIPPED_SUFFIXES):
            unknown.append(stored_name)
    if missing:
        raise ValueError(f"{path} lacks {_some(missing)}; check that all files of the checkpoint are there "
                         "and that config.json (biases, tie_word_embeddings, layers) belongs to it")
    if unknown:
        raise ValueError(f"{path} has tensors that no parameter takes: {_some(unknown)}; "
                         "check that config.json belongs to it")
    if model.lm_head is None:
        _check_tied(model, Path(path), destinations["model.embed_tokens.weight"])


def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random parameters of scale 0.02 and norm weights of 1, the same whole matrices however many ranks share them.

    Each matrix that a checkpoint would hold is drawn on the device of its parameter, by a stream of its own.
    """
    for name, destination in destinations_of(model).items():
        view = destination.parts[0][1]
        values = torch.ones(destination.shape, dtype=view.dtype, device=view.device)
        if not destination.is_norm:
            generator = torch.Generator(view.device).manual_seed(crc32(f"{seed} {name}".encode()))
            values.normal_(0, DUMMY_SCALE, generator=generator)
        destination.fill(values)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, slices of the tensor) of everything in the checkpoint; nothing is read before it is sliced."""
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                yield name, tensors.get_slice(name)


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


def destinations_of(model: nn.Module) -> dict[str, Destination]:
    """Every name a checkpoint may hold, and what it fills; merged parameters have several, fused ones several parts."""
    return {name: destination for path, module in model.named_modules()
            for parameter, tensor in module.named_parameters(recurse=False)
            for name, destination in _destinations(path, module, parameter, tensor)}


def _destinations(path: str, module: nn.Module, name: str, tensor: Tensor) -> Iterator[tuple[str, Destination]]:
    own = f"{path}.{name}"
    if isinstance(module, MergedLinear):
        parent = path.rpartition(".")[0]
        views = tensor.split([part.size for part in module.parts.values()])
        for (sibling, part), view in zip(module.parts.items(), views):
            yield f"{parent}.{sibling}.{name}", _split([(part, view)], axis=0)
    elif isinstance(module, ColumnLinear):
        views = tensor.split([part.size for part in module.parts])
        yield own, _split(list(zip(module.parts, views)), axis=0)
    elif isinstance(module, VocabEmbedding):
        yield own, _split([(module.part, tensor)], axis=0)
    elif isinstance(module, RowLinear) and name == "weight":
        yield own, _split([(module.part, tensor)], axis=1)
    else:
        whole = tuple(slice(None) for _ in tensor.shape)
        yield own, Destination(tuple(tensor.shape), ((whole, tensor),), isinstance(module, RMSNorm))


def _split(parts: list[tuple[Part, Tensor]], axis: int) -> Destination:
    """Of a tensor that is split along `axis`, and whole along the others."""
    first, view = parts[0]
    shape, whole = list(view.shape), [slice(None)] * view.ndim
    shape[axis] = first.total
    return Destination(tuple(shape), tuple(
        ((*whole[:axis], slice(part.start, part.stop), *whole[axis + 1:]), view) for part, view in parts), False)


def _fill(name: str, stored: Any, destination: Destination) -> None:
    if (shape := tuple(stored.get_shape())) != destination.shape:
        raise ValueError(f"{name} has shape {list(shape)} in the checkpoint but {list(destination.shape)} by "
                         "config.json; one of them belongs to another model")
    destination.fill(stored)


def _check_tied(model: CausalLM, path: Path, embedding: Destination) -> None:
    """Raises ValueError if a head is stored that is not the embedding (compared in the rows of this rank)."""
    for name, head in _stored_tensors(path):
        if _renamed(name, model) == "lm_head.weight":
            (part, view), = embedding.parts
            kept = head[part] if tuple(head.get_shape()) == embedding.shape else None
            if kept is None or not torch.equal(kept.to(view), view[:len(kept)]):
                raise ValueError(
                    f"{path}: config.json ties the head to the embedding, but the stored lm_head.weight differs from "
                    "it; set tie_word_embeddings to false to use the stored head")


def _some(names: set[str] | list[str]) -> str:
    shown = sorted(names)[:NAMES_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
