"""Whole prompts recomputed densely in plain torch from the files of a checkpoint, with image KV put in from elsewhere.

Nothing here knows nanovllm: weights and config are read here, positions are counted token by token, windows of the
vision tower are masks over patches in the order they come, and keys are kept unrotated, so that a moved image is
nothing but the same keys rotated at other positions.
"""
from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.prompts import Picture, Prompt

Ratios = float | Sequence[float]


@dataclass(frozen=True)
class Rows:
    """Keys before rotation and values of some tokens in all layers, `[layers, tokens, kv_heads, head_dim]`."""

    keys: Tensor
    values: Tensor

    def __getitem__(self, tokens: slice) -> Rows:
        return Rows(self.keys[:, tokens], self.values[:, tokens])


@dataclass(frozen=True)
class Override:
    """KV that stands in for what tokens `start ..` would get by computation: in layer l from row `first_rows[l]` on."""

    start: int
    rows: Rows
    first_rows: Sequence[int]


@dataclass(frozen=True)
class Dense:
    """A whole forward pass: logits `[tokens, vocab]` and the KV of all tokens, overrides included."""

    logits: Tensor
    rows: Rows
    keys: Tensor        # rotated, `[layers, tokens, kv_heads, head_dim]`


class Oracle:
    """One checkpoint in float32; Qwen3, or Qwen2.5-VL with its vision tower; plain rotary positions only."""

    def __init__(self, folder: str | Path) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        self.text: dict[str, Any] = config | config.get("text_config", {})
        self.vision: dict[str, Any] | None = config.get("vision_config")
        stored = {name: tensor.float() for file in Path(folder).glob("*.safetensors")
                  for name, tensor in load_file(file).items()}
        self.weights = {name.replace("model.visual.", "visual.").replace("language_model.", ""): tensor
                        for name, tensor in stored.items()}
        rope = self.text.get("rope_parameters") or (self.text.get("rope_scaling") or {}) | {
            "rope_theta": self.text.get("rope_theta")}
        assert rope.get("rope_type", "default") in ("default", "mrope"), rope
        self.num_layers: int = self.text["num_hidden_layers"]
        self.head_dim: int = self.text.get("head_dim") or self.text["hidden_size"] // self.text["num_attention_heads"]
        sections = rope.get("mrope_section") or [self.head_dim // 2]
        self.axis_of_pair = [axis for axis, size in enumerate(sections) for _ in range(size)]
        self.inv_freq = _inverse_frequencies(rope["rope_theta"], self.head_dim)
        self.encoded: dict[Picture, Tensor] = {}

    # ------------------------------------------------------------ positions

    def positions(self, prompt: Prompt, num_tokens: int | None = None) -> Tensor:
        """int64 [3, num_tokens] (t, h, w), by the published rule, one token after the other."""
        starts, position = dict(prompt.pictures), 0
        places: list[tuple[int, int, int]] = []
        while len(places) < max(len(prompt), num_tokens or 0):
            picture = starts.get(len(places))
            if picture is None:
                places.append((position, position, position))
            else:
                places += [(position + t, position + h, position + w) for t, h, w in self._offsets(picture)]
                position = max(map(max, places[-picture.num_tokens:]))
            position += 1
        return torch.tensor(places[:num_tokens]).T

    def _offsets(self, picture: Picture) -> list[tuple[int, int, int]]:
        assert self.vision is not None
        (frames, height, width), merge = picture.grid, self.vision["spatial_merge_size"]
        interval = 0 if picture.seconds is None else picture.seconds * self.vision["tokens_per_second"]
        return [(math.floor(t * interval), h, w) for t in range(frames) for h in range(height // merge)
                for w in range(width // merge)]

    # ------------------------------------------------------------ decoder

    @torch.inference_mode()
    def forward(self, prompt: Prompt, generated: Sequence[int] = (), overrides: Sequence[Override] = ()) -> Dense:
        """All tokens of the prompt and of what was generated behind it, each seeing those before it."""
        ids = torch.tensor(prompt.token_ids + list(generated))
        x = self.weights["model.embed_tokens.weight"][ids]
        for start, picture in prompt.pictures:
            x[start:start + picture.num_tokens] = self.encode(picture)
        angles = self.positions(prompt, len(ids))[self.axis_of_pair].T.float() * self.inv_freq      # [tokens, pairs]
        kept, rotated = [], []
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            q, k, v = self._projections(name, self._norm(x, f"{name}.input_layernorm"))
            for override in overrides:
                first, size = override.first_rows[layer], override.rows.keys.shape[1]
                target = slice(override.start + first, override.start + size)
                k[target], v[target] = override.rows.keys[layer, first:], override.rows.values[layer, first:]
            kept.append((k, v))
            rotated.append(_rotate(k, angles))
            attended = _causal_attention(_rotate(q, angles), rotated[-1], v)
            x = x + self._linear(attended.flatten(1), f"{name}.self_attn.o_proj")
            x = x + self._gated_mlp(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        head = "model.embed_tokens" if self.text.get("tie_word_embeddings") else "lm_head"
        logits = self._norm(x, "model.norm") @ self.weights[f"{head}.weight"].T
        keys, values = (torch.stack(parts) for parts in zip(*kept))
        return Dense(logits, Rows(keys, values), torch.stack(rotated))

    def logprobs(self, prompt: Prompt, generated: Sequence[int], overrides: Sequence[Override] = ()) -> Tensor:
        """[generated, vocab]: what each generated token was drawn from."""
        logits = self.forward(prompt, generated[:-1], overrides).logits
        return logits[len(prompt) - 1:].log_softmax(-1)

    def _projections(self, name: str, x: Tensor) -> list[Tensor]:
        q, k, v = (self._linear(x, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, self.head_dim))
                   for part in "qkv")
        if f"{name}.self_attn.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.self_attn.q_norm"), self._norm(k, f"{name}.self_attn.k_norm")
        return [q, k, v]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.text["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.weights[f"{name}.weight"]

    def _gated_mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        return self._linear(F.silu(gate) * up, f"{name}.down_proj")

    # ------------------------------------------------------------ vision tower

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """Rows [tokens, hidden] of a picture, kept for the next time."""
        if picture not in self.encoded:
            self.encoded[picture] = self._encode(picture)
        return self.encoded[picture]

    def _encode(self, picture: Picture) -> Tensor:
        vision = self.vision
        assert vision is not None
        merge, heads = vision["spatial_merge_size"], vision["num_heads"]
        window = vision["window_size"] // vision["patch_size"] // merge * merge         # patches a side
        (frames, height, width) = picture.grid
        places = torch.tensor([(t, h + y, w + x) for t in range(frames) for h in range(0, height, merge)
                               for w in range(0, width, merge) for y in range(merge) for x in range(merge)])
        frame, row, column = places.T
        same_frame = frame[:, None] == frame
        same_window = same_frame & (row[:, None] // window == row // window) & (
            column[:, None] // window == column // window)
        inv_freq = _inverse_frequencies(10000.0, vision["hidden_size"] // heads // 2)
        angles = torch.cat((row[:, None] * inv_freq, column[:, None] * inv_freq), dim=1)
        x = picture.pixels @ self.weights["visual.patch_embed.proj.weight"].flatten(1).T
        for block in range(vision["depth"]):
            name = f"visual.blocks.{block}"
            mask = same_frame if block in vision["fullatt_block_indexes"] else same_window
            qkv = self._linear(self._norm(x, f"{name}.norm1", 1e-6), f"{name}.attn.qkv")
            q, k, v = (part.unflatten(-1, (heads, -1)) for part in qkv.chunk(3, dim=-1))
            attended = _attention(_rotate(q, angles), _rotate(k, angles), v, mask)
            x = x + self._linear(attended.flatten(1), f"{name}.attn.proj")
            x = x + self._gated_mlp(self._norm(x, f"{name}.norm2", 1e-6), f"{name}.mlp")
        squares = self._norm(x, "visual.merger.ln_q", 1e-6).reshape(len(x) // merge**2, -1)
        return self._linear(F.gelu(self._linear(squares, "visual.merger.mlp.0")), "visual.merger.mlp.2")


def _inverse_frequencies(theta: float, dim: int) -> Tensor:
    return 1 / theta ** (torch.arange(0, dim, 2) / dim)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the pairs (i, i + dim / 2) of x [tokens, heads, dim] by angles [tokens, dim / 2]."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [tokens, heads, dim] over k, v [tokens, kv_heads, dim] where mask [tokens, tokens] is True."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -math.inf).softmax(-1), v)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attention(q, k, v, torch.ones(len(q), len(k), dtype=torch.bool).tril())


# ---------------------------------------------------------------- reuse

@dataclass
class Entry:
    """KV of a picture computed in full, and whether nothing before it was reused."""

    rows: Rows
    exact: bool


@dataclass
class ReuseOracle:
    """What an engine must answer, request by request, while no entry is evicted; prefix hits are told to it."""

    oracle: Oracle
    any_ordinal: bool = False
    entries: dict[Picture, dict[int, Entry]] = field(default_factory=dict)
    num_reused: int = 0             # rows of the last request that were not computed in layer 0
    num_recomputed: int = 0         # leading rows of its reused pictures that were

    last: Dense | None = None       # of the last request

    def logprobs(self, prompt: Prompt, generated: Sequence[int], ratios: Ratios, num_cached: int = 0,
                 cached: Rows | None = None) -> Tensor:
        """[generated, vocab] of the next request, whose pictures enter the table as the engine's do.

        num_cached: leading tokens that came from the prefix cache; cached: their KV where it is not exact.
        """
        per_layer = [ratios] * self.oracle.num_layers if isinstance(ratios, (int, float)) else list(ratios)
        reuses = set(per_layer) not in ({0.0}, {1.0})
        overrides: dict[int, Override] = {}
        self.num_reused = self.num_recomputed = 0
        for i, (start, picture) in enumerate(prompt.pictures if reuses else []):
            stop = min(start + picture.num_tokens, len(prompt) - 1)         # the last token is always computed
            hit = min(max(0, num_cached - start), stop - start)
            first_rows = [max(hit, min(math.ceil(ratio * picture.num_tokens), stop - start)) for ratio in per_layer]
            entry = self._find(i, picture)
            if entry is not None and first_rows[-1] < stop - start:
                overrides[i] = Override(start, entry.rows[:stop - start], first_rows)
                self.num_reused += stop - start - first_rows[0]
                self.num_recomputed += first_rows[0] - hit
        hits = [] if cached is None else [Override(0, cached[:num_cached], [0] * self.oracle.num_layers)]
        self.last = dense = self.oracle.forward(prompt, generated[:-1], [*hits, *overrides.values()])
        for i, (start, picture) in enumerate(prompt.pictures):
            if i not in overrides:
                self._store(i, picture, Entry(dense.rows[start:start + picture.num_tokens],
                                              exact=not any(j < i for j in overrides)))
        return dense.logits[len(prompt) - 1:].log_softmax(-1)

    def _find(self, ordinal: int, picture: Picture) -> Entry | None:
        variants = self.entries.get(picture, {})
        if ordinal not in variants and self.any_ordinal and variants:
            ordinal = min(variants, key=lambda other: (abs(other - ordinal), other))
        return variants.get(ordinal)

    def _store(self, ordinal: int, picture: Picture, entry: Entry) -> None:
        variants = self.entries.setdefault(picture, {})
        old = variants.get(ordinal)
        if old is None or (entry.exact and not old.exact):
            variants[ordinal] = entry
