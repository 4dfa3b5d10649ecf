"""Reads what a model folder says of its model, in every published form; no other file knows these key names."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.checks import check_choice, check_int, check_number

TEXT_ARCHITECTURE = "Qwen3ForCausalLM"
VISION_ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: angles `position / theta ** (2i / head_dim)`, changed by yarn's rules where `type` says so."""

    type: str                                           # "default" or "yarn"
    theta: float
    mrope_section: tuple[int, ...] | None = None        # angles of head_dim / 2 that turn by t, by h and by w
    factor: float = 1.0                                 # yarn: how far the context is stretched ...
    original_max_position_embeddings: int = 0           # ... from this many positions
    beta_fast: float = 32.0                             # yarn: turns within the original context above which ...
    beta_slow: float = 1.0                              # ... an angle is kept, and below which it is divided by factor
    attention_factor: float = 1.0                       # multiplies cos and sin
    truncate: bool = True                               # yarn: whether the border dimensions are rounded outwards


@dataclass(frozen=True)
class TextConfig:
    """Sizes of the decoder; `hidden_size` and `num_heads * head_dim` may differ."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    rope: RopeConfig


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the vision tower; `window_size` is in pixels, `tokens_per_second` in temporal positions."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    in_channels: int
    window_size: int
    fullatt_block_indexes: tuple[int, ...]
    tokens_per_second: float

    @property
    def patch_dim(self) -> int:
        """Values of one patch, the row length of pixel_values."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class ModelConfig:
    """What a model folder says: sizes, special ids, the ids that end a sequence and the dtype of its weights."""

    path: str
    architecture: str
    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int | None
    video_token_id: int | None
    vision_start_token_id: int | None
    vision_end_token_id: int | None
    eos_token_ids: frozenset[int]
    dtype: str

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads config.json, generation_config.json and the tokenizer's files of the model folder `path`.

        Raises FileNotFoundError without a config.json, and ValueError naming the key and the file for whatever is
        missing, malformed or not supported (another architecture, rope type, quantization, sliding windows).
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{path} has no config.json: give the folder of a Hugging Face checkpoint")
        config = _read_json(file)
        text_config = config.get("text_config") or {}
        keys = _Keys(file, (text_config, config))
        architecture = _architecture(keys)
        multimodal = architecture == VISION_ARCHITECTURE
        text = _text_config(keys, multimodal)
        vision = _vision_config(_Keys(file, (keys.require("vision_config"),)), text) if multimodal else None

        def special_id(key: str) -> int | None:
            return keys.integer(key, minimum=0) if multimodal else None

        return cls(
            path=str(path), architecture=architecture, text=text, vision=vision,
            image_token_id=special_id("image_token_id"), video_token_id=special_id("video_token_id"),
            vision_start_token_id=special_id("vision_start_token_id"),
            vision_end_token_id=special_id("vision_end_token_id"),
            eos_token_ids=_eos_token_ids(Path(path), (config, text_config)),
            dtype=_dtype(file, (config, text_config)),
        )


class _Keys:
    """The keys of one JSON file: the first of `sections` that has a key decides, and errors name key and file."""

    def __init__(self, file: Path, sections: tuple[dict[str, Any], ...]) -> None:
        self.file, self.sections = file, sections

    def find(self, key: str) -> Any:
        return next((section[key] for section in self.sections if section.get(key) is not None), None)

    def require(self, key: str) -> Any:
        if (value := self.find(key)) is None:
            raise ValueError(f"{self.file}: the key '{key}' is missing; add it as the published checkpoint has it")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.require(key) if default is None else self.find(key)
        return check_int(f"{self.file}: {key}", default if value is None else value, minimum,
                         f"a whole number of at least {minimum}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self.require(key) if default is None else self.find(key)
        return check_number(f"{self.file}: {key}", default if value is None else value, lambda x: x > 0,
                            "a number above 0")

    def flag(self, key: str) -> bool:
        """True if any section says so; absent counts as False."""
        return any(section.get(key) is True for section in self.sections)

    def refuse(self, key: str, value: Any, remedy: str) -> None:
        raise ValueError(f"{self.file}: {key}={value!r} is not supported; {remedy}")


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; an absent file is an empty one."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object; download it again")
    return value


def _architecture(keys: _Keys) -> str:
    """The supported architecture of the folder; refuses by name whatever would be computed wrongly."""
    names = keys.require("architectures")
    supported = (TEXT_ARCHITECTURE, VISION_ARCHITECTURE)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
        keys.refuse("architectures", names, f"use a model of {' or '.join(supported)}")
    if (quantization := keys.find("quantization_config")) is not None:
        keys.refuse("quantization_config", quantization, "use the checkpoint that is not quantized")
    if keys.flag("use_sliding_window"):
        keys.refuse("use_sliding_window", True, "use a checkpoint with full attention")
    layer_types = keys.find("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        keys.refuse("layer_types", layer_types, "use a checkpoint with full attention in every layer")
    if (activation := keys.require("hidden_act")) != "silu":
        keys.refuse("hidden_act", activation, "use a checkpoint with silu")
    return str(names[0])


def _text_config(keys: _Keys, multimodal: bool) -> TextConfig:
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", default=num_heads)
    # The two architectures differ in what they do without a head_dim: Qwen2.5-VL divides, Qwen3 takes 128.
    head_dim = keys.integer("head_dim", default=hidden_size // num_heads if multimodal else 128)
    if num_heads % num_kv_heads:
        keys.refuse("num_key_value_heads", num_kv_heads, f"it must divide the {num_heads} attention heads")
    if head_dim % 2 or (multimodal and head_dim * num_heads != hidden_size):
        keys.refuse("head_dim", head_dim, "it must be even, and for Qwen2.5-VL hidden_size / num_attention_heads")
    bias = keys.flag("attention_bias")
    return TextConfig(
        hidden_size=hidden_size, num_layers=keys.integer("num_hidden_layers"), num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"), rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"), qkv_bias=multimodal or bias,
        o_bias=bias and not multimodal, qk_norm=not multimodal,
        max_position_embeddings=keys.integer("max_position_embeddings"), rope=_rope_config(keys, head_dim, multimodal))


def _rope_config(keys: _Keys, head_dim: int, multimodal: bool) -> RopeConfig:
    """The rotary rules: `rope_scaling` (older) or `rope_parameters` of the innermost section that has one."""
    scaling: dict[str, Any] = next((found for section in keys.sections
                                    if (found := section.get("rope_scaling") or section.get("rope_parameters"))), {})
    rope = _Keys(keys.file, (scaling, *keys.sections))
    own = _Keys(keys.file, (scaling,))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "mrope" and multimodal:
        kind = "default"                      # its sections say all that the word says
    if kind not in ("default", "yarn"):
        keys.refuse("rope_type", kind, "use a checkpoint with rope type 'default', 'yarn' or Qwen2.5-VL's 'mrope'")
    if (partial := rope.find("partial_rotary_factor")) not in (None, 1):
        keys.refuse("partial_rotary_factor", partial, "use a checkpoint that rotates whole heads")
    theta = rope.number("rope_theta")
    sections = None
    if multimodal:
        sections = tuple(own.require("mrope_section"))
        if len(sections) != 3 or sum(sections) != head_dim // 2:
            keys.refuse("mrope_section", list(sections), f"it must hold three numbers that sum to {head_dim // 2}")
    if kind == "default":
        return RopeConfig(kind, theta, sections)
    factor = own.number("factor")
    return RopeConfig(
        kind, theta, sections, factor=factor,
        original_max_position_embeddings=own.integer("original_max_position_embeddings",
                                                     default=keys.integer("max_position_embeddings")),
        beta_fast=own.number("beta_fast", default=32.0), beta_slow=own.number("beta_slow", default=1.0),
        attention_factor=own.number("attention_factor", default=_yarn_attention_factor(scaling, factor)),
        truncate=scaling.get("truncate") is not False)


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """What cos and sin are multiplied by where the config does not say: 0.1 * mscale * ln(factor) + 1."""
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)


def _vision_config(keys: _Keys, text: TextConfig) -> VisionConfig:
    full = keys.require("fullatt_block_indexes")
    vision = VisionConfig(
        depth=keys.integer("depth"), hidden_size=keys.integer("hidden_size"), num_heads=keys.integer("num_heads"),
        intermediate_size=keys.integer("intermediate_size"), out_hidden_size=keys.integer("out_hidden_size"),
        patch_size=keys.integer("patch_size"), spatial_merge_size=keys.integer("spatial_merge_size"),
        temporal_patch_size=keys.integer("temporal_patch_size"),
        in_channels=keys.integer("in_channels", default=3),     # the published files have it under another name
        window_size=keys.integer("window_size"),
        fullatt_block_indexes=tuple(check_int(f"{keys.file}: fullatt_block_indexes", index, 0, "layer numbers")
                                    for index in full),
        tokens_per_second=keys.number("tokens_per_second"))
    if vision.hidden_size % (4 * vision.num_heads):
        keys.refuse("num_heads", vision.num_heads, f"a head of the {vision.hidden_size} must be a multiple of 4")
    if vision.out_hidden_size != text.hidden_size:
        keys.refuse("out_hidden_size", vision.out_hidden_size, f"it must be the text's hidden_size {text.hidden_size}")
    if vision.window_size < vision.spatial_merge_size * vision.patch_size:
        keys.refuse("window_size", vision.window_size, "it must hold at least one merged patch, in pixels")
    if (activation := keys.require("hidden_act")) != "silu":
        keys.refuse("hidden_act", activation, "use a checkpoint with silu")
    return vision


def _dtype(file: Path, sections: tuple[dict[str, Any], ...]) -> str:
    """The dtype the weights are said to have; float32 where nothing is said."""
    names = (section.get(key) for section in sections for key in ("dtype", "torch_dtype"))
    return check_choice(f"{file}: dtype", next((name for name in names if name is not None), "float32"), DTYPES)


def _eos_token_ids(folder: Path, sections: tuple[dict[str, Any], ...]) -> frozenset[int]:
    """Every id that ends a sequence: of config, text_config, generation_config and tokenizer together."""
    ids: set[int] = set()
    for section in (*sections, _read_json(folder / "generation_config.json")):
        given = section.get("eos_token_id")
        for token_id in given if isinstance(given, list) else [] if given is None else [given]:
            ids.add(check_int(f"{folder}: eos_token_id", token_id, 0, "a token id or a list of them"))
    token = (_read_json(folder / "tokenizer_config.json").get("eos_token")
             or _read_json(folder / "special_tokens_map.json").get("eos_token"))
    if token is not None:
        ids.add(_token_id(folder, token["content"] if isinstance(token, dict) else token))
    return frozenset(ids)


def _token_id(folder: Path, token: str) -> int:
    """The id of `token` in the tokenizer's files, the small ones first."""
    for token_id, added in _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        if added["content"] == token:
            return int(token_id)
    added_tokens = _read_json(folder / "added_tokens.json")
    if token in added_tokens:
        return int(added_tokens[token])
    tokenizer = _read_json(folder / "tokenizer.json")
    vocabularies = ({added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])},
                    tokenizer.get("model", {}).get("vocab", {}), _read_json(folder / "vocab.json"))
    for vocabulary in vocabularies:
        if token in vocabulary:
            return int(vocabulary[token])
    raise ValueError(f"{folder}: no tokenizer file gives the id of eos_token {token!r}; download tokenizer.json again")
