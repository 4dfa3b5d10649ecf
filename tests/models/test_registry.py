"""Building: the architecture by name, parameters in their place and dtype, tables untouched."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanovllm.attention import select_backend
from nanovllm.model_config import ModelConfig
from nanovllm.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.registry import build_model
from tests.checkpoints import make_qwen2_5_vl, make_qwen3


def test_architectures_by_name(tmp_path):
    backend = select_backend("torch", "cpu")
    text = ModelConfig.from_folder(make_qwen3(tmp_path / "text"))
    assert type(build_model(text, backend, torch.float32, "cpu")) is Qwen3ForCausalLM
    vision = ModelConfig.from_folder(make_qwen2_5_vl(tmp_path / "vision"))
    assert type(build_model(vision, backend, torch.float32, "cpu")) is Qwen2_5_VLForConditionalGeneration
    with pytest.raises(ValueError, match="'LlamaForCausalLM'.*Qwen3ForCausalLM"):
        build_model(replace(text, architecture="LlamaForCausalLM"), backend, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_have_the_dtype_and_tables_keep_float32(tmp_path, dtype):
    config = ModelConfig.from_folder(make_qwen2_5_vl(tmp_path))
    model = build_model(config, select_backend("torch", "cpu"), dtype, "cpu")
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.model.parameters()} == {dtype}
    assert {p.dtype for p in model.visual.parameters()} == {torch.bfloat16 if dtype == torch.float16 else dtype}
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype == model.visual.inv_freq.dtype == torch.float32 and not rotary.inv_freq.is_meta
    torch.testing.assert_close(rotary.inv_freq, 5000.0 ** (-torch.arange(8) / 8))
