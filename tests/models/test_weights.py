"""Loading: every parameter once, every tensor used, and errors that name what is wrong."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.attention import select_backend
from nanovllm.model_config import ModelConfig
from nanovllm.models.decoder import CausalLM
from nanovllm.models.registry import build_model
from nanovllm.models.weights import init_dummy_weights, load_weights
from tests.checkpoints import make_qwen2_5_vl, make_qwen3


def build(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return build_model(ModelConfig.from_folder(path), select_backend("torch", "cpu"), dtype, "cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = build(path, dtype)
    load_weights(model, path)
    return model


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the one file of a checkpoint; None removes. `__` in a name stands for a dot."""
    stored = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def write_config(path: Path, **keys: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | keys))


def same(a: CausalLM, b: CausalLM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("make", [make_qwen3, make_qwen2_5_vl])
def test_merged_parameters_hold_the_stored_parts(tmp_path, make):
    path = make(tmp_path)
    stored, attention = load_file(path / "model.safetensors"), load(path).model.layers[1].self_attn
    prefix = "model.layers.1.self_attn"
    parts = [stored[f"{prefix}.{part}.weight"] for part in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(attention.qkv_proj.weight, torch.cat(parts))
    assert (attention.qkv_proj.bias is not None) == (f"{prefix}.q_proj.bias" in stored)


def test_shards_of_the_index_and_no_other_file(tmp_path):
    single = load(make_qwen3(tmp_path / "single"))
    sharded = make_qwen3(tmp_path / "sharded", num_shards=3)
    save_file({"stray": torch.zeros(1)}, sharded / "model-extra.safetensors")
    assert same(single, load(sharded))


def test_a_missing_shard_is_named(tmp_path):
    path = make_qwen3(tmp_path, num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        load(path)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path):
    path = make_qwen3(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors.*load_format='dummy'"):
        load(path)


@pytest.mark.parametrize("stored", [False, True])
def test_tied_head_is_the_embedding(tmp_path, stored):
    model = load(make_qwen3(tmp_path, tie=True, store_head=stored))
    assert model.lm_head is None
    hidden = torch.randn(2, 64)
    assert torch.equal(model.compute_logits(hidden), hidden @ model.model.embed_tokens.weight.T)


def test_tied_flag_in_text_config_only(tmp_path):
    path = make_qwen2_5_vl(tmp_path, tie=True, new_config=True)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).lm_head is None


def test_tied_head_that_differs_is_refused(tmp_path):
    path = make_qwen3(tmp_path, tie=True, store_head=True)
    change(path, lm_head__weight=load_file(path / "model.safetensors")["lm_head.weight"] + 1)
    with pytest.raises(ValueError, match=r"lm_head.weight differs.*tie_word_embeddings"):
        load(path)


def test_untied_head_is_its_own(tmp_path):
    model = load(make_qwen3(tmp_path))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_untied_without_a_stored_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight.*tie_word_embeddings"):
        load(make_qwen3(tmp_path, store_head=False))


def test_missing_parameter_is_named(tmp_path):
    path = make_qwen3(tmp_path)
    change(path, model__layers__2__self_attn__k_proj__weight=None)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.self_attn\.k_proj\.weight"):
        load(path)


def test_missing_bias_is_named(tmp_path):
    path = make_qwen3(tmp_path)
    write_config(path, attention_bias=True)
    with pytest.raises(ValueError, match=r"lacks .*self_attn\.k_proj\.bias.* and \d+ more"):
        load(path)


def test_unused_tensor_is_named(tmp_path):
    path = make_qwen3(tmp_path, attention_bias=True)
    write_config(path, attention_bias=False)
    with pytest.raises(ValueError, match=r"no parameter takes.*model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(path)


def test_frequencies_of_old_exporters_are_skipped(tmp_path):
    path = make_qwen3(tmp_path)
    change(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))
    load(path)


def test_shape_mismatch_names_both_shapes(tmp_path):
    path = make_qwen3(tmp_path)
    change(path, model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 64))
    with pytest.raises(ValueError, match=r"k_proj\.weight has shape \[32, 64\].*\[64, 64\]"):
        load(path)


def test_one_parameter_under_both_names_is_refused(tmp_path):
    path = make_qwen2_5_vl(tmp_path)
    change(path, model__visual__merger__ln_q__weight=torch.ones(48))
    with pytest.raises(ValueError, match=r"visual\.merger\.ln_q\.weight is stored twice"):
        load(path)


def test_values_are_converted_to_the_parameters_dtype(tmp_path):
    path = make_qwen3(tmp_path, dtype=torch.bfloat16)
    single, half = load(path, torch.float32), load(path, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    assert same(single, half.float())


def test_dummy_weights_depend_on_the_seed_alone(tmp_path):
    path = make_qwen2_5_vl(tmp_path)
    models = [build(path), build(path), build(path)]
    for model, seed in zip(models, (0, 0, 1)):
        init_dummy_weights(model, seed)
    assert same(models[0], models[1]) and not same(models[0], models[2])
    weight = models[0].model.layers[0].mlp.gate_up_proj.weight
    assert 0.018 < weight.std() < 0.022
    for name, parameter in models[0].named_parameters():
        assert parameter.isfinite().all()
        assert parameter.eq(1).all() == ("norm" in name or "ln_q" in name)
