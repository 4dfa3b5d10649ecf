"""Rotary angles and rotations against their definitions and against transformers."""
from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLTextConfig, Qwen3Config
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3 import modeling_qwen3

from nanovllm.layers.rotary import RotaryEmbedding, apply_rotary
from nanovllm.model_config import RopeConfig

POSITIONS = torch.tensor([0, 1, 2, 77, 511, 4095, 30000])
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=5000.0)


def yarn_config(**keys) -> RopeConfig:
    attention_factor = keys.get("attention_factor", 1.1386294361119891)     # 0.1 * ln(4) + 1
    return RopeConfig("yarn", 5000.0, None, 4.0, 64, keys.get("beta_fast", 32), keys.get("beta_slow", 1),
                      attention_factor, keys.get("truncate", True))


def transformers_rotation(parameters, head_dim=32):
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters,
                         max_position_embeddings=256)
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    return cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]


@pytest.mark.parametrize("parameters,rope", [
    (dict(rope_type="default", rope_theta=5000.0), RopeConfig("default", 5000.0)),
    (YARN, yarn_config()),
    (YARN | dict(attention_factor=1.5), yarn_config(attention_factor=1.5)),
    (YARN | dict(beta_fast=6.0, beta_slow=2.0), yarn_config(beta_fast=6.0, beta_slow=2.0)),
    (YARN | dict(truncate=False), yarn_config(truncate=False)),
], ids=["default", "yarn", "attention_factor", "betas", "no truncate"])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_rotation_equals_transformers_bit_for_bit(parameters, rope, head_dim):
    cos, sin = RotaryEmbedding(rope, head_dim)(POSITIONS[None])
    expected_cos, expected_sin = transformers_rotation(parameters, head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, expected_cos) and torch.equal(sin, expected_sin)


def test_sections_turn_by_their_axes():
    sections, head_dim = (2, 3, 3), 16
    positions = torch.tensor([[3, 3, 4, 900], [3, 5, 4, 17], [3, 9, 4, 0]])
    config = Qwen2_5_VLTextConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256,
        rope_parameters=dict(rope_type="default", rope_theta=5000.0, mrope_section=list(sections)))
    theirs = modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding(config)
    cos, sin = RotaryEmbedding(RopeConfig("default", 5000.0, sections), head_dim)(positions)
    q = torch.randn(4, 2, head_dim, generator=torch.Generator().manual_seed(0))
    angles = torch.empty(4, head_dim // 2)
    for pair in range(head_dim // 2):
        axis = 0 if pair < 2 else 1 if pair < 5 else 2
        angles[:, pair] = positions[axis] * 5000.0 ** (-2 * pair / head_dim)
    torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-4)
    rotated = apply_rotary(q, (cos, sin))
    pairs = torch.complex(*q.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotated, torch.cat((pairs.real, pairs.imag), -1), rtol=0, atol=1e-3)
    if hasattr(theirs, "recomposition_frequencies"):     # before it, the sections were chosen where q was rotated
        expected_cos, expected_sin = theirs(torch.zeros(1), positions[:, None])
        assert torch.equal(cos, expected_cos[0, :, :8]) and torch.equal(sin, expected_sin[0, :, :8])


def test_one_axis_equals_three_equal_axes():
    one = RotaryEmbedding(RopeConfig("default", 1e4), 16)(POSITIONS[None])
    three = RotaryEmbedding(RopeConfig("default", 1e4, (2, 3, 3)), 16)(POSITIONS.expand(3, -1))
    assert torch.equal(one[0], three[0]) and torch.equal(one[1], three[1])


def test_bfloat16_is_rounded_once():
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = RotaryEmbedding(RopeConfig("default", 1e4), 32)(torch.tensor([[0, 1, 50, 800, 9000]]))
    assert torch.equal(apply_rotary(x, rotation), apply_rotary(x.float(), rotation).bfloat16())
    assert apply_rotary(x, rotation).dtype == torch.bfloat16


def test_sections_must_cover_the_head():
    with pytest.raises(ValueError, match=r"\[2, 3, 2\] sums to 7.*head_dim / 2 = 8"):
        RotaryEmbedding(RopeConfig("default", 1e4, (2, 3, 2)), 16)
