"""Runs transformers' Qwen2.5-VL weights over rows of packed sequences and pictures, without a loop over windows."""
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.quality.pictures import SceneTables, paint
from tools.shapes.batches import MAX_CELLS, Batch

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PATCH = 14


def paint_patches(scenes: SceneTables, scene: Tensor, place: Tensor) -> Tensor:
    """float32 [rows, patches, 3 * 2 * 14 * 14] as the processor writes them; scene [rows, patches], -1: empty."""
    inner = torch.arange(PATCH, device=scene.device)
    y = (place[..., 0, None, None] * PATCH + inner[:, None]).expand(*scene.shape, PATCH, PATCH)
    x = (place[..., 1, None, None] * PATCH + inner).expand(*scene.shape, PATCH, PATCH)
    rgb = paint(scenes, scene.clamp(min=0)[..., None, None].expand_as(y), y, x) / 255
    rgb = (rgb - torch.tensor(MEAN, device=rgb.device)) / torch.tensor(STD, device=rgb.device)
    twice = rgb.movedim(-1, -3).unsqueeze(-3).expand(*scene.shape, 3, 2, PATCH, PATCH)
    return twice.reshape(*scene.shape, -1)


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (i, i + dim / 2) of x [rows, tokens, heads, dim]; cos and sin are [rows, tokens, 1, dim / 2]."""
    cos, sin = turns
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[rows, tokens, heads * dim]; q [rows, tokens, heads, dim], mask bool [rows, tokens, tokens]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask[:, None])
    return out.transpose(1, 2).flatten(2)


def inverse_frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, device=device) / dim)


def turns_of(angles: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, tokens, 1, dim / 2] of angles [rows, tokens, dim / 2]."""
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def vision_block(block: Any, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, heads: int) -> Tensor:
    """One block of the tower over x [rows, patches, hidden]."""
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, heads, -1)).unbind(2)
    x = x + block.attn.proj(attend(rotate(q, turns), rotate(k, turns), v, mask))
    return x + block.mlp(block.norm2(x))


def text_layer(layer: Any, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor, head_dim: int) -> Tensor:
    """One decoder layer over x [rows, tokens, hidden]."""
    normed, part = layer.input_layernorm(x), layer.self_attn
    q, k, v = (projection(normed).unflatten(-1, (-1, head_dim))
               for projection in (part.q_proj, part.k_proj, part.v_proj))
    x = x + part.o_proj(attend(rotate(q, turns), rotate(k, turns), v, mask))
    return x + layer.mlp(layer.post_attention_layernorm(x))


class PackedModel(nn.Module):
    """The model's own modules, called on packed rows, with two read-outs for training alone: what a cell shows, from
    what the vision tower gives, and where the cell lies, from the hidden states halfway through the text layers."""

    def __init__(self, model: Any, num_cells: int) -> None:
        super().__init__()
        self.model = model
        text = model.config.text_config
        self.cell_head = nn.Linear(text.hidden_size, num_cells)
        self.spot_head = nn.Linear(text.hidden_size, MAX_CELLS ** 2)
        self.head_dim = text.hidden_size // text.num_attention_heads
        rope = text.rope_parameters
        self.theta = float(rope["rope_theta"])
        self.axis_of_pair = [axis for axis, size in enumerate(rope["mrope_section"]) for _ in range(size)]
        self.vision_block, self.text_layer = vision_block, text_layer

    def compile_layers(self) -> None:
        """Compiles one layer of each half, which serves for all: seconds, where the whole model takes minutes."""
        self.vision_block = torch.compile(vision_block, dynamic=False)
        self.text_layer = torch.compile(text_layer, dynamic=False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [rows, TEXT_ROW, vocab], of cells [vision rows, VISION_ROW // 4, cells], of spots [rows, TEXT_ROW,
        MAX_CELLS ** 2]."""
        with torch.no_grad():
            patches = paint_patches(batch.scenes, batch.scene, batch.place)
        merged = self.see(patches, batch)
        logits, halfway = self.read(merged.flatten(0, 1), batch)
        return logits, self.cell_head(merged), self.spot_head(halfway)

    def see(self, patches: Tensor, batch: Batch) -> Tensor:
        """[vision rows, VISION_ROW // 4, hidden]."""
        visual = self.model.model.visual
        x = F.linear(patches, visual.patch_embed.proj.weight.flatten(1))
        heads = self.model.config.vision_config.num_heads
        dim = x.shape[-1] // heads
        turns = turns_of((batch.place[..., None] * inverse_frequencies(10000.0, dim // 2, x.device)).flatten(2))
        same_picture, same_window = (number[:, :, None] == number[:, None, :] for number in (batch.scene, batch.window))
        full = self.model.config.vision_config.fullatt_block_indexes
        for index, block in enumerate(visual.blocks):
            x = self.vision_block(block, x, turns, same_picture if index in full else same_window, heads)
        x = visual.merger.ln_q(x)
        return visual.merger.mlp(x.reshape(len(x), x.shape[1] // 4, -1))

    def read(self, merged: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [rows, TEXT_ROW, vocab] and hidden states behind half of the layers; merged [all merged rows, hidden].
        """
        text = self.model.model.language_model
        x = text.embed_tokens(batch.ids)
        x = torch.where((batch.source >= 0)[..., None], merged[batch.source.clamp(min=0)].to(x.dtype), x)
        turns = turns_of(batch.positions[..., self.axis_of_pair] * inverse_frequencies(
            self.theta, self.head_dim, x.device))
        mask = (batch.sequence[:, :, None] == batch.sequence[:, None, :]).tril()
        halfway = x
        for index, layer in enumerate(text.layers):
            x = self.text_layer(layer, x, turns, mask, self.head_dim)
            if index + 1 == len(text.layers) // 2:
                halfway = x
        return self.model.lm_head(text.norm(x)), halfway


def losses(logits: Tensor, cell_logits: Tensor, spot_logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy of the answers' tokens, of what the cells show, and of where they lie."""
    answers, cells, spots = (
        F.cross_entropy(given.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)
        for given, wanted in ((logits, batch.targets), (cell_logits, batch.cell), (spot_logits, batch.spot)))
    return answers, cells, spots


def right_by_kind(logits: Tensor, batch: Batch, num_kinds: int) -> Tensor:
    """int64 [num_kinds, 2]: answers whose first token is right, and all."""
    asked = batch.kinds >= 0
    kinds, right = batch.kinds[asked], logits.argmax(-1)[asked] == batch.targets[asked]
    return torch.stack([torch.bincount(each, minlength=num_kinds) for each in (kinds[right], kinds)], dim=1)


def learning_rate(elapsed: float, total: float, step: int, peak: float, warm_up: int = 200) -> float:
    """Rises over the first steps of a leg, and falls along a cosine over the seconds of all legs to a fiftieth."""
    share = min(1.0, elapsed / total)
    return peak * min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
