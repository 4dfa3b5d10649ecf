"""Runs padded batches of prompts densely over transformers' Qwen2.5-VL weights, any rows' KV given from elsewhere."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from tools.shapes.packed import attend, inverse_frequencies, rotate, turns_of


@dataclass(frozen=True)
class Prompt:
    """One prompt, its pictures encoded."""

    hidden: Tensor                          # [tokens, hidden]: embeddings, pictures' rows in their places
    positions: Tensor                       # int64 [tokens, 3]: t, h, w
    images: tuple[tuple[int, int], ...]     # [start, stop) of each picture

    def __len__(self) -> int:
        return len(self.hidden)


@dataclass(frozen=True)
class KV:
    """Keys before rotation and values of a batch, both [layers, prompts, tokens, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


class Dense:
    """A model in float32 on the CPU."""

    def __init__(self, folder: str) -> None:
        self.model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.text, config = self.model.model.language_model, self.model.config.text_config
        self.num_layers = len(self.text.layers)
        self.head_dim = config.hidden_size // config.num_attention_heads
        rope = config.rope_parameters
        self.inv_freq = inverse_frequencies(float(rope["rope_theta"]), self.head_dim, torch.device("cpu"))
        self.axis_of_pair = [axis for axis, size in enumerate(rope["mrope_section"]) for _ in range(size)]

    @torch.inference_mode()
    def prompt(self, inputs: Mapping[str, Any]) -> Prompt:
        """A prompt of text and pictures (no videos) from what the processor made of it."""
        ids = inputs["input_ids"][0]
        merge = self.model.config.vision_config.spatial_merge_size
        hidden = self.text.embed_tokens(ids)
        places: list[tuple[int, int, int]] = []
        images: list[tuple[int, int]] = []
        encoded = self.model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        # Before transformers 5.5 the rows themselves.
        hidden[ids == self.model.config.image_token_id] = getattr(encoded, "pooler_output", encoded)
        grids = iter((inputs["image_grid_thw"] // torch.tensor([1, merge, merge])).tolist())
        position = 0
        while len(places) < len(ids):
            if ids[len(places)] == self.model.config.image_token_id:
                _, rows, cols = next(grids)
                images.append((len(places), len(places) + rows * cols))
                places += [(position, position + row, position + col) for row in range(rows) for col in range(cols)]
                position += max(rows, cols)
            else:
                places.append((position, position, position))
                position += 1
        return Prompt(hidden, torch.tensor(places), tuple(images))

    @torch.inference_mode()
    def run(self, prompts: Sequence[Prompt], given: KV | None = None,
            computed: Tensor | None = None) -> tuple[Tensor, KV]:
        """(log-probabilities [prompts, vocab] of the token behind each prompt, all KV) of a batch, padded at its end.

        A row whose `computed`, bool [layers, prompts, tokens], is False in a layer has the KV of `given` there. Its
        hidden state goes on through that layer all the same, as long as a later one computes it. Without `computed`
        every row is.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        hidden, positions = (torch.nn.utils.rnn.pad_sequence([getattr(prompt, name) for prompt in prompts], True)
                             for name in ("hidden", "positions"))
        place = torch.arange(hidden.shape[1])
        if computed is None:
            computed = (place < lengths[:, None]).expand(self.num_layers, -1, -1)
        # Only rows that some layer computes are carried: [prompts, rows], the others of a prompt behind them.
        carried = computed.any(0)
        rows = (~carried).int().argsort(dim=1, stable=True)[:, :int(carried.sum(1).max())]
        turns = turns_of(positions[..., self.axis_of_pair] * self.inv_freq)
        cos, sin = (_take(part, rows) for part in turns)
        mask = place <= rows[..., None]                             # [prompts, rows, tokens]
        x, kept = _take(hidden, rows), []
        for index, layer in enumerate(self.text.layers):
            q, k, v = (projection(layer.input_layernorm(x)).unflatten(-1, (-1, self.head_dim)) for projection in (
                layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
            own = computed[index].gather(1, rows)
            old = (None, None) if given is None else (given.keys[index], given.values[index])
            keys, values = (_put(*parts, rows, own, len(place)) for parts in zip(old, (k, v)))
            kept.append((keys, values))
            x = x + layer.self_attn.o_proj(attend(rotate(q, (cos, sin)), rotate(keys, turns), values, mask))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = (rows == lengths[:, None] - 1).int().argmax(1)
        logits = self.model.lm_head(self.text.norm(x[torch.arange(len(x)), last]))
        return logits.log_softmax(-1), KV(*(torch.stack(parts) for parts in zip(*kept)))


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x [prompts, tokens, ...] at rows [prompts, rows]."""
    return x[torch.arange(len(x))[:, None], rows]


def _put(old: Tensor | None, new: Tensor, rows: Tensor, own: Tensor, num_tokens: int) -> Tensor:
    """[prompts, tokens, ...]: old, or zeros, with new [prompts, rows, ...] where own [prompts, rows] is True."""
    out = new.new_zeros(len(new), num_tokens, *new.shape[2:]) if old is None else old.clone()
    prompt = torch.arange(len(new))[:, None].expand_as(rows)
    out[prompt[own], rows[own]] = new[own]
    return out
