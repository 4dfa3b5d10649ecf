"""Rotary positions: angles of 1-axis and M-RoPE positions, default and yarn, applied in float32."""
from __future__ import annotations

import math
from itertools import chain

import torch
from torch import Tensor, nn

from nanovllm.attention.contract import FusedOps
from nanovllm.model_config import RopeConfig

Rotation = tuple[Tensor, Tensor]    # cos and sin, float32 [tokens, head_dim / 2]


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns x `[tokens, heads, head_dim]`: pair `(i, i + head_dim / 2)` of token `n` by its angle `[n, i]`.

    Computed in float32 and rounded once to x's dtype.
    """
    cos, sin = (part.unsqueeze(1) for part in rotation)     # [tokens, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def inverse_frequencies(theta: float, dim: int) -> Tensor:
    """Angle per position of each pair of a head of `dim` values: float32 `[dim / 2]`."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def yarn_inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """As `inverse_frequencies`, stretched by yarn (arXiv 2309.00071): fast pairs are kept, slow ones are divided."""

    def pair_turning(times: float) -> float:
        """The (fractional) pair that makes this many full turns within the original context."""
        wavelength = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001     # a step instead of a ramp where both borders are one pair
    slow = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    fast = 1 - slow
    original = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (rope.factor * original) * (1 - fast) + 1.0 / original * fast


class RotaryEmbedding(nn.Module):
    """Positions `[axes, tokens]` to the rotation of each token; pair `i` turns by axis `axis_of_pair[i]`.

    Raises ValueError if mrope_section does not share out exactly head_dim / 2 pairs.
    """

    inv_freq: Tensor
    axis_of_pair: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, fused: FusedOps | None = None) -> None:
        super().__init__()
        self.fused = fused
        sections = rope.mrope_section or (head_dim // 2,)
        if sum(sections) != head_dim // 2:
            raise ValueError(f"mrope_section {list(sections)} sums to {sum(sections)}, not to head_dim / 2 = "
                             f"{head_dim // 2}; correct it in config.json")
        axes = list(chain.from_iterable([i % 3] * size for i, size in enumerate(sections)))
        yarn = rope.type == "yarn"
        inv_freq = yarn_inverse_frequencies(rope, head_dim) if yarn else inverse_frequencies(rope.theta, head_dim)
        # On the CPU whatever the device of construction is: these are values, not room for a checkpoint's.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("axis_of_pair", torch.tensor(axes, device="cpu"), persistent=False)
        self.attention_factor = rope.attention_factor

    def forward(self, positions: Tensor) -> Rotation:
        """cos and sin, float32 `[tokens, head_dim / 2]`, of positions int64 `[axes, tokens]`."""
        if self.fused is not None:
            return self.fused.rotation(positions, self.inv_freq, self.axis_of_pair, self.attention_factor)
        axis_positions = positions.index_select(0, self.axis_of_pair).float()   # [head_dim / 2, tokens]
        angles = axis_positions.T.contiguous() * self.inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
