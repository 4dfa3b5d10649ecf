"""Makes tiny seeded checkpoints in the published layouts, which nanovllm and transformers load like the real ones."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Json = dict[str, Any]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
WORDS = "which colour has the large circle left of the small square? it is red, and the picture shows three shapes."

# As in the published template: a system turn is added where there is none, and content keeps its order.
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe helpful<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{ part.text }}
            {%- else %}{{ '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEXT_SIZES: Json = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    max_position_embeddings=4096, rms_norm_eps=1e-6)
VISION_SIZES: Json = dict(
    depth=4, hidden_size=48, num_heads=3, intermediate_size=80, patch_size=14, spatial_merge_size=2,
    temporal_patch_size=2, window_size=112, fullatt_block_indexes=[1, 3], tokens_per_second=2)
DEFAULT_ROPE: Json = {"rope_theta": 5000.0}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges and the special tokens of the Qwen family, at ids of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.add_special_tokens(
        [END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE)


def make_qwen3(
    path: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, tie: bool = False,
    store_head: bool | None = None, attention_bias: bool = False, head_dim: int = 32, vocab_padding: int = 0,
    rope: Json | None = None, new_config: bool = False, num_shards: int = 1, **sizes: Any,
) -> Path:
    """Writes a Qwen3 folder to `path` and returns it.

    rope: rope_theta, and for yarn its other keys. new_config: rope_parameters and dtype, as transformers 5 writes them,
    instead of rope_theta, rope_scaling and torch_dtype. store_head: whether lm_head is in the files; None: if
    untied (of a tied model it is the embedding).
    num_shards: above 1 with an index. sizes: keys of TEXT_SIZES.
    """
    tokenizer = _save_tokenizer(Path(path))
    config = _text_keys(tokenizer, sizes, vocab_padding) | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=head_dim, attention_bias=attention_bias,
        tie_word_embeddings=tie, **_dtype_key(dtype, new_config), **_rope_keys(rope or DEFAULT_ROPE, new_config))
    weights = _Weights(seed)
    weights.add_decoder("model.", config, head_dim, qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True)
    weights.add_head("model.", config, tie, store_head)
    return _save(Path(path), config, weights, dtype, num_shards)


def make_qwen2_5_vl(
    path: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, tie: bool = False,
    store_head: bool | None = None, vocab_padding: int = 0, rope: Json | None = None, new_config: bool = False,
    new_names: bool = False, num_shards: int = 1, vision: Json | None = None, max_pixels: int = 1024 * 28 * 28,
    **sizes: Any,
) -> Path:
    """Writes a Qwen2.5-VL folder with its processor to `path` and returns it.

    new_config: sizes in text_config with rope_parameters, as transformers 5 writes them, instead of the flat published
    form. new_names: `model.visual.*` and `model.language_model.*` instead of the published `visual.*` and `model.*`.
    vision: keys of VISION_SIZES. max_pixels: of the image processor. The rest is as in `make_qwen3`.
    """
    tokenizer = _save_tokenizer(Path(path))
    _save_processor(Path(path), max_pixels)
    text = _text_keys(tokenizer, sizes, vocab_padding)
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    side = 3 * head_dim // 16                   # the published split: a quarter turns by t, the rest by h and by w
    mrope = {"type": "mrope", "mrope_section": [head_dim // 2 - 2 * side, side, side]}
    text |= _rope_keys(mrope | (rope or DEFAULT_ROPE), new_config)
    vision_config = _override(VISION_SIZES, vision or {}) | dict(
        model_type="qwen2_5_vl", hidden_act="silu", in_chans=3, out_hidden_size=text["hidden_size"])
    special = dict(image_token_id=IMAGE_PAD, video_token_id=VIDEO_PAD, vision_start_token_id=VISION_START,
                   vision_end_token_id=VISION_END)
    config = dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", vision_config=vision_config,
        tie_word_embeddings=tie, **{key: tokenizer.convert_tokens_to_ids(token) for key, token in special.items()},
        **_dtype_key(dtype, new_config), **({"text_config": text | {"model_type": "qwen2_5_vl_text"}}
                                            if new_config else text))
    weights = _Weights(seed)
    prefix = "model.language_model." if new_names else "model."
    weights.add_decoder(prefix, text, head_dim, qkv_bias=True)
    weights.add_vision("model.visual." if new_names else "visual.", vision_config)
    weights.add_head(prefix, text, tie, store_head)
    return _save(Path(path), config, weights, dtype, num_shards)


class _Weights(dict[str, torch.Tensor]):
    """Random tensors by checkpoint name, of a size that lets every part of the model matter for the argmax."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def _noise(self, name: str, *shape: int, mean: float = 0.0, std: float) -> None:
        self[name] = mean + std * torch.randn(shape, generator=self.generator)

    def add_linear(self, name: str, out_features: int, in_features: int, bias: bool = False) -> None:
        self._noise(f"{name}.weight", out_features, in_features, std=1.3 / in_features**0.5)
        if bias:
            self._noise(f"{name}.bias", out_features, std=0.3)

    def add_norm(self, name: str, size: int) -> None:
        self._noise(f"{name}.weight", size, mean=1.0, std=0.2)

    def add_mlp(self, name: str, hidden: int, intermediate: int, bias: bool = False) -> None:
        self.add_linear(f"{name}.gate_proj", intermediate, hidden, bias)
        self.add_linear(f"{name}.up_proj", intermediate, hidden, bias)
        self.add_linear(f"{name}.down_proj", hidden, intermediate, bias)

    def add_decoder(self, prefix: str, config: Json, head_dim: int, qkv_bias: bool = False, o_bias: bool = False,
                    qk_norm: bool = False) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self._noise(f"{prefix}embed_tokens.weight", config["vocab_size"], hidden, std=0.4)
        self.add_norm(f"{prefix}norm", hidden)
        for layer in range(config["num_hidden_layers"]):
            name = f"{prefix}layers.{layer}"
            self.add_norm(f"{name}.input_layernorm", hidden)
            self.add_linear(f"{name}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
            for part in ("k_proj", "v_proj"):
                self.add_linear(f"{name}.self_attn.{part}", config["num_key_value_heads"] * head_dim, hidden, qkv_bias)
            self.add_linear(f"{name}.self_attn.o_proj", hidden, heads * head_dim, o_bias)
            for part in ("q_norm", "k_norm") if qk_norm else ():
                self.add_norm(f"{name}.self_attn.{part}", head_dim)
            self.add_norm(f"{name}.post_attention_layernorm", hidden)
            self.add_mlp(f"{name}.mlp", hidden, config["intermediate_size"])

    def add_head(self, prefix: str, config: Json, tie: bool, stored: bool | None) -> None:
        embedding = self[f"{prefix}embed_tokens.weight"]
        if tie:
            embedding *= 0.4        # else every token's own embedding, still in the residual stream, says: again
            if stored:
                self["lm_head.weight"] = embedding.clone()
        elif stored is not False:
            self.add_linear("lm_head", config["vocab_size"], config["hidden_size"])

    def add_vision(self, prefix: str, config: Json) -> None:
        hidden, patch, merged = config["hidden_size"], config["patch_size"], config["spatial_merge_size"] ** 2
        shape = (hidden, config["in_chans"], config["temporal_patch_size"], patch, patch)
        self._noise(f"{prefix}patch_embed.proj.weight", *shape, std=0.03)
        for block in range(config["depth"]):
            name = f"{prefix}blocks.{block}"
            self.add_norm(f"{name}.norm1", hidden)
            self.add_linear(f"{name}.attn.qkv", 3 * hidden, hidden, bias=True)
            self.add_linear(f"{name}.attn.proj", hidden, hidden, bias=True)
            self.add_norm(f"{name}.norm2", hidden)
            self.add_mlp(f"{name}.mlp", hidden, config["intermediate_size"], bias=True)
        self.add_norm(f"{prefix}merger.ln_q", hidden)
        self.add_linear(f"{prefix}merger.mlp.0", hidden * merged, hidden * merged, bias=True)
        self.add_linear(f"{prefix}merger.mlp.2", config["out_hidden_size"], hidden * merged, bias=True)


def _override(defaults: Json, given: Json) -> Json:
    if unknown := given.keys() - defaults.keys():
        raise TypeError(f"{sorted(unknown)}: not among {sorted(defaults)}")
    return defaults | given


def _text_keys(tokenizer: PreTrainedTokenizerFast, sizes: Json, vocab_padding: int) -> Json:
    return _override(TEXT_SIZES, sizes) | dict(
        vocab_size=len(tokenizer) + vocab_padding, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        hidden_act="silu", use_sliding_window=False, sliding_window=None)


def _dtype_key(dtype: torch.dtype, new_config: bool) -> Json:
    return {"dtype" if new_config else "torch_dtype": str(dtype).removeprefix("torch.")}


def _rope_keys(rope: Json, new_config: bool) -> Json:
    """The rotary keys in the form of transformers 5, or in the older one."""
    if new_config:
        kind = rope.get("rope_type", "default")
        return {"rope_parameters": {key: value for key, value in rope.items() if key != "type"} | {"rope_type": kind}}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling or None}


def _save(path: Path, config: Json, weights: _Weights, dtype: torch.dtype, num_shards: int) -> Path:
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": config.get("text_config", config)["eos_token_id"]})
    tensors = {name: tensor.to(dtype) for name, tensor in weights.items()}
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    files = [f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors" for shard in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, path / file,
                  metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return path


def _save_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    return tokenizer


def _save_processor(path: Path, max_pixels: int) -> None:
    _write_json(path / "preprocessor_config.json", dict(
        image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor", min_pixels=56 * 56,
        max_pixels=max_pixels, patch_size=14, temporal_patch_size=2, merge_size=2,
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711]))


def _write_json(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
