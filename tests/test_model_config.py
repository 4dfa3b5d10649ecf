"""Every published form of a model folder is read as transformers reads it, and the unsupported is refused by name."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.model_config import ModelConfig, RopeConfig, VisionConfig
from tests.checkpoints import make_qwen2_5_vl, make_qwen3

Json = dict[str, Any]
ABSENT = object()

# config.json of the published checkpoints, less the keys that change nothing.
QWEN3_0_6B: Json = dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, bos_token_id=151643, eos_token_id=151645, head_dim=128,
    hidden_act="silu", hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
    model_type="qwen3", num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06,
    rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True, torch_dtype="bfloat16",
    use_sliding_window=False, vocab_size=151936)
QWEN3_8B = QWEN3_0_6B | dict(
    hidden_size=4096, intermediate_size=12288, max_window_layers=36, num_attention_heads=32, num_hidden_layers=36,
    tie_word_embeddings=False)
QWEN3_32B = QWEN3_8B | dict(
    hidden_size=5120, intermediate_size=25600, max_window_layers=64, num_attention_heads=64, num_hidden_layers=64)
VISION: Json = dict(
    depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3,
    out_hidden_size=2048, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, temporal_patch_size=2)
QWEN2_5_VL_3B: Json = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"], bos_token_id=151643, eos_token_id=151645,
    vision_start_token_id=151652, vision_end_token_id=151653, vision_token_id=151654, image_token_id=151655,
    video_token_id=151656, hidden_act="silu", hidden_size=2048, intermediate_size=11008, max_position_embeddings=128000,
    max_window_layers=70, model_type="qwen2_5_vl", num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=2,
    rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, torch_dtype="bfloat16",
    use_sliding_window=False, vision_config=VISION, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    vocab_size=151936)
QWEN2_5_VL_7B = QWEN2_5_VL_3B | dict(
    hidden_size=3584, intermediate_size=18944, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28,
    num_key_value_heads=4, tie_word_embeddings=False, vocab_size=152064,
    vision_config=VISION | {"out_hidden_size": 3584})
TOP_KEYS = {"architectures", "model_type", "vision_config", "tie_word_embeddings", "torch_dtype",
            "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id", "vision_token_id"}
YARN: Json = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)


def write(path: Path, config: Json, **files: Json) -> Path:
    """A model folder with that config.json (keys set to ABSENT left out) and other JSON files, named without suffix."""
    path.mkdir(exist_ok=True)
    for name, value in {"config": config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps({k: v for k, v in value.items() if v is not ABSENT}))
    return path


def read(path: Path, config: Json, **files: Json) -> ModelConfig:
    return ModelConfig.from_folder(write(path, config, **files))


def nested(config: Json) -> Json:
    """The published flat Qwen2.5-VL config as transformers 5 saves it."""
    top = {key: value for key, value in config.items() if key in TOP_KEYS}
    text = {key: value for key, value in config.items() if key not in TOP_KEYS | {"rope_theta", "rope_scaling"}}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"],
            "mrope_section": config["rope_scaling"]["mrope_section"]}
    return top | {"text_config": text | {"rope_parameters": rope}}


@pytest.mark.parametrize("config, sizes, tie", [
    (QWEN3_0_6B, (1024, 28, 16, 8, 128, 3072, 151936, 40960), True),
    (QWEN3_8B, (4096, 36, 32, 8, 128, 12288, 151936, 40960), False),
    (QWEN3_32B, (5120, 64, 64, 8, 128, 25600, 151936, 40960), False),
    (QWEN2_5_VL_3B, (2048, 36, 16, 2, 128, 11008, 151936, 128000), True),
    (QWEN2_5_VL_7B, (3584, 28, 28, 4, 128, 18944, 152064, 128000), False),
])
def test_published_configs(tmp_path: Path, config: Json, sizes: tuple[int, ...], tie: bool) -> None:
    model = read(tmp_path, config)
    text = model.text
    assert sizes == (text.hidden_size, text.num_layers, text.num_heads, text.num_kv_heads, text.head_dim,
                     text.intermediate_size, text.vocab_size, text.max_position_embeddings)
    assert (model.path, model.architecture, model.dtype) == (str(tmp_path), config["architectures"][0], "bfloat16")
    assert (text.tie_word_embeddings, text.rms_norm_eps) == (tie, 1e-6)
    is_vl = "vision_config" in config
    assert (text.qkv_bias, text.o_bias, text.qk_norm) == (is_vl, False, not is_vl)
    assert text.rope == RopeConfig("default", 1e6, (16, 24, 24) if is_vl else None)
    assert model.eos_token_ids == {151645}


def test_published_vision_config(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN2_5_VL_3B)
    assert model.vision == VisionConfig(
        depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=2048, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2, in_channels=3, window_size=112,
        fullatt_block_indexes=(7, 15, 23, 31), tokens_per_second=2)
    assert model.vision.patch_dim == 1176
    assert (model.image_token_id, model.video_token_id) == (151655, 151656)
    assert (model.vision_start_token_id, model.vision_end_token_id) == (151652, 151653)


def test_text_models_have_no_image_ids(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_0_6B | {"image_token_id": 5})
    assert model.vision is model.image_token_id is model.video_token_id is model.vision_start_token_id is None


@pytest.mark.parametrize("config", [QWEN2_5_VL_3B, QWEN2_5_VL_7B])
def test_flat_and_nested_forms_agree(tmp_path: Path, config: Json) -> None:
    flat = read(tmp_path, config)
    assert read(tmp_path, nested(config)) == flat
    assert read(tmp_path, config | nested(config)) == flat         # transformers 4.5x saves both
    old_nested = nested(config)
    old_rope = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    old_nested["text_config"] |= {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": old_rope}
    assert read(tmp_path, old_nested) == flat


@pytest.mark.parametrize("rope", [
    dict(rope_theta=5000.0, rope_scaling=None),
    dict(rope_theta=ABSENT, rope_parameters={"rope_theta": 5000.0, "rope_type": "default"}),
    dict(rope_theta=5000.0, rope_parameters={"rope_type": "default"}),
    dict(rope_theta=7.0, rope_parameters={"rope_theta": 5000.0}),             # the inner one decides
    dict(rope_theta=ABSENT, text_config={"rope_theta": 5000.0}),
    dict(rope_theta=ABSENT, text_config={"rope_parameters": {"rope_theta": 5000.0}}),
    dict(rope_theta=7.0, text_config={"rope_theta": 5000.0}),
    dict(rope_theta=7.0, rope_parameters={"rope_theta": 9.0}, rope_scaling={"rope_theta": 5000.0}),
])
def test_rope_theta_in_every_place(tmp_path: Path, rope: Json) -> None:
    assert read(tmp_path, QWEN3_0_6B | rope).text.rope == RopeConfig("default", 5000.0)


@pytest.mark.parametrize("config", [
    QWEN3_0_6B | {"rope_theta": ABSENT},
    QWEN3_0_6B | {"rope_theta": None, "rope_parameters": {"rope_type": "default"}},
    QWEN2_5_VL_3B | {"rope_theta": ABSENT},
])
def test_missing_rope_theta_is_an_error(tmp_path: Path, config: Json) -> None:
    with pytest.raises(ValueError, match=r"config.json: the key 'rope_theta' is missing"):
        read(tmp_path, config)


@pytest.mark.parametrize("extra", [
    {}, {"beta_fast": 16, "beta_slow": 2}, {"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"truncate": False}, {"original_max_position_embeddings": ABSENT}])
@pytest.mark.parametrize("make", [make_qwen3, make_qwen2_5_vl])
def test_yarn_equals_transformers(tmp_path: Path, make: Any, extra: Json) -> None:
    rope = {key: value for key, value in (YARN | {"rope_theta": 5000.0} | extra).items() if value is not ABSENT}
    path = make(tmp_path, rope=rope, max_position_embeddings=4096)
    config = AutoConfig.from_pretrained(path).get_text_config()
    ours = ModelConfig.from_folder(path).text.rope
    assert (ours.type, ours.theta, ours.factor) == ("yarn", 5000.0, 4.0)
    assert ours.original_max_position_embeddings == config.rope_parameters["original_max_position_embeddings"]
    assert (ours.beta_fast, ours.beta_slow) == (extra.get("beta_fast", 32), extra.get("beta_slow", 1))
    assert ours.truncate is ("truncate" not in extra)
    if make is make_qwen3:
        reference = AutoModelForCausalLM.from_config(config).model.rotary_emb.attention_scaling
        assert ours.attention_factor == pytest.approx(reference, rel=1e-12)


def test_yarn_needs_its_factor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the key 'factor' is missing"):
        read(tmp_path, QWEN3_8B | {"rope_scaling": {"rope_type": "yarn"}})


@pytest.mark.parametrize("new_config", [False, True])
@pytest.mark.parametrize("top, text", [(True, ABSENT), (False, ABSENT), (ABSENT, True), (ABSENT, False),
                                       (ABSENT, ABSENT), (False, True), (True, False)])
def test_tie_flag_is_resolved_as_transformers_does(tmp_path: Path, top: Any, text: Any, new_config: bool) -> None:
    path = make_qwen2_5_vl(tmp_path, new_config=new_config)
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": top}
    if new_config:
        config["text_config"]["tie_word_embeddings"] = text
        config["text_config"] = {key: value for key, value in config["text_config"].items() if value is not ABSENT}
    ours = read(path, config).text.tie_word_embeddings
    assert ours == AutoConfig.from_pretrained(path).tie_word_embeddings


@pytest.mark.parametrize("tie", [True, False, ABSENT])
def test_tie_flag_of_qwen3(tmp_path: Path, tie: Any) -> None:
    ours = read(tmp_path, QWEN3_0_6B | {"tie_word_embeddings": tie}).text.tie_word_embeddings
    assert ours == AutoConfig.from_pretrained(tmp_path).tie_word_embeddings == (tie is True)


def test_sizes_that_may_be_absent(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_8B | dict(
        head_dim=ABSENT, num_key_value_heads=None, attention_bias=True, hidden_size=2560))
    assert (model.text.head_dim, model.text.num_kv_heads) == (128, 32)
    assert model.text.qkv_bias and model.text.o_bias
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 128


@pytest.mark.parametrize("config, names", [
    (QWEN3_8B | {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*Qwen3ForCausalLM"),
    (QWEN3_8B | {"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    (QWEN3_8B | {"architectures": ABSENT}, "'architectures' is missing"),
    (QWEN3_8B | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
    (nested(QWEN2_5_VL_3B) | {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
    (QWEN3_8B | {"use_sliding_window": True}, "use_sliding_window=True"),
    (QWEN2_5_VL_7B | {"text_config": {"use_sliding_window": True}}, "use_sliding_window=True"),
    (QWEN3_8B | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding"),
    (QWEN3_8B | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (QWEN3_8B | {"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type='linear'"),
    (QWEN3_8B | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type='dynamic'"),
    (QWEN3_8B | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type='llama3'"),
    (QWEN3_8B | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type='mrope'"),
    (QWEN3_8B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (QWEN2_5_VL_3B | {"rope_scaling": None}, "'mrope_section' is missing"),
    (QWEN2_5_VL_3B | {"rope_scaling": {"mrope_section": [16, 24, 23]}}, r"mrope_section=\[16, 24, 23\].*sum to 64"),
    (QWEN2_5_VL_3B | {"head_dim": 64}, "head_dim=64"),
    (QWEN3_8B | {"num_key_value_heads": 5}, "num_key_value_heads=5.*32 attention heads"),
    (QWEN3_8B | {"hidden_size": "4096"}, "hidden_size='4096': give"),
    (QWEN3_8B | {"num_hidden_layers": 0}, "num_hidden_layers=0: give"),
    (QWEN3_8B | {"rms_norm_eps": ABSENT}, "'rms_norm_eps' is missing"),
    (QWEN3_8B | {"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
    (QWEN2_5_VL_3B | {"vision_config": ABSENT}, "'vision_config' is missing"),
    (QWEN2_5_VL_3B | {"image_token_id": ABSENT}, "'image_token_id' is missing"),
    (QWEN2_5_VL_3B | {"vision_config": VISION | {"tokens_per_second": None}}, "'tokens_per_second' is missing"),
    (QWEN2_5_VL_3B | {"vision_config": VISION | {"out_hidden_size": 3584}}, "out_hidden_size=3584.* 2048"),
    (QWEN2_5_VL_3B | {"vision_config": VISION | {"fullatt_block_indexes": ["7"]}}, "fullatt_block_indexes='7'"),
    (QWEN2_5_VL_3B | {"vision_config": VISION | {"hidden_act": "quick_gelu"}}, "hidden_act='quick_gelu'"),
    (QWEN2_5_VL_3B | {"vision_config": VISION | {"window_size": 8}}, "window_size=8"),
])
def test_unsupported_and_malformed_configs_are_refused_by_name(tmp_path: Path, config: Json, names: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{names}|config.json: {names}"):
        read(tmp_path, config)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, QWEN3_0_6B)
    for name, text in (("generation_config.json", "{"), ("config.json", "[]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("keys, dtype", [
    (dict(torch_dtype="float16"), "float16"), (dict(torch_dtype=ABSENT, dtype="bfloat16"), "bfloat16"),
    (dict(torch_dtype="float16", dtype="bfloat16"), "bfloat16"), (dict(torch_dtype=ABSENT), "float32"),
    (dict(torch_dtype=ABSENT, text_config={"torch_dtype": "float16"}), "float16"),
])
def test_dtype_in_every_place(tmp_path: Path, keys: Json, dtype: str) -> None:
    assert read(tmp_path, QWEN3_0_6B | keys).dtype == dtype


@pytest.mark.parametrize("config_eos, generation_eos, tokenizer, expected", [
    (1, None, {}, {1}), ([1, 2], 3, {}, {1, 2, 3}), (None, [151645, 151643], {}, {151645, 151643}),
    (None, None, {}, set()),
    (1, 2, {"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}}, {1, 2, 9}),
    (1, 0, {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"9": {"content": "<end>"}}}, {0, 1, 9}),
])
def test_eos_ids_of_all_files(tmp_path: Path, config_eos: Any, generation_eos: Any, tokenizer: Json,
                              expected: set[int]) -> None:
    config = QWEN3_0_6B | {"eos_token_id": config_eos}
    files = {"generation_config": {"eos_token_id": generation_eos}, "tokenizer_config": tokenizer}
    assert read(tmp_path, config, **files).eos_token_ids == expected


@pytest.mark.parametrize("files", [
    {"added_tokens": {"<end>": 9}}, {"tokenizer": {"added_tokens": [{"content": "<end>", "id": 9}]}},
    {"tokenizer": {"model": {"vocab": {"<end>": 9}}}}, {"vocab": {"<end>": 9}},
])
@pytest.mark.parametrize("named_in", ["tokenizer_config", "special_tokens_map"])
def test_eos_token_is_looked_up_in_every_tokenizer_file(tmp_path: Path, files: Json, named_in: str) -> None:
    config = QWEN3_0_6B | {"eos_token_id": 1}
    assert read(tmp_path, config, **{named_in: {"eos_token": "<end>"}}, **files).eos_token_ids == {1, 9}


def test_eos_of_nested_config_and_wrong_ones(tmp_path: Path) -> None:
    assert read(tmp_path, nested(QWEN2_5_VL_3B) | {"eos_token_id": [5]}).eos_token_ids == {5, 151645}
    with pytest.raises(ValueError, match="eos_token_id='x'"):
        read(tmp_path, QWEN3_0_6B | {"eos_token_id": "x"})
    with pytest.raises(ValueError, match="'<end>'"):
        read(tmp_path, QWEN3_0_6B, tokenizer_config={"eos_token": "<end>"})


@pytest.mark.parametrize("make", [make_qwen3, make_qwen2_5_vl])
@pytest.mark.parametrize("new_config", [False, True])
def test_made_checkpoints_are_read(tmp_path: Path, make: Any, new_config: bool) -> None:
    model = ModelConfig.from_folder(make(tmp_path, new_config=new_config, vocab_padding=7))
    reference = AutoConfig.from_pretrained(tmp_path)
    text = reference.get_text_config()
    assert model.text.vocab_size == text.vocab_size and model.eos_token_ids == {text.eos_token_id}
    assert model.text.rope.theta == text.rope_parameters["rope_theta"] == 5000.0
    assert model.dtype == str(reference.dtype).removeprefix("torch.")
    if model.vision is not None:
        assert model.image_token_id == reference.image_token_id < model.text.vocab_size
        assert list(model.vision.fullatt_block_indexes) == reference.vision_config.fullatt_block_indexes
