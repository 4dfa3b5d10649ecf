"""Writes the folder of an untrained shapes model, and its weights once they are trained."""
from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from nanovllm.quality.shapes import KINDS, ask_one, distracting_text
from tests.checkpoints import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    TURN_START,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)

Json = dict[str, Any]
SPECIAL = [END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
VOCAB_SIZE = 800
# The model that is shipped (6.3 M parameters), and one that learns something within minutes on a CPU.
SIZES: dict[str, Json] = {
    "shipped": dict(text=dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
                              intermediate_size=448),
                    vision=dict(depth=4, hidden_size=160, num_heads=5, intermediate_size=320,
                                fullatt_block_indexes=[1, 3])),
    "tiny": dict(text=dict(hidden_size=96, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
                           intermediate_size=160),
                 vision=dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=96, fullatt_block_indexes=[1]))}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every word of the questions, answers and distracting texts is one token."""
    rng = random.Random(0)
    questions = [ask_one(rng, kind) for _ in range(300) for kind in KINDS]
    corpus = [f"{asked.question}\n{asked.answer}" for asked in questions]
    corpus += [distracting_text(rng, 5) for _ in range(300)] + ["system\nbe helpful user\nassistant\n"] * 100
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT,
                                   chat_template=CHAT_TEMPLATE)


def write_folder(path: Path, size: str) -> None:
    """Everything but the weights: tokenizer, processor, config, generation_config."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(path)
    ids = {token: tokenizer.get_vocab()[token] for token in SPECIAL}
    _write(path / "config.json", _config(size, ids, len(tokenizer)))
    _write(path / "generation_config.json", {"eos_token_id": ids[TURN_END], "pad_token_id": ids[END_OF_TEXT]})
    _write(path / "preprocessor_config.json", dict(
        image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor", min_pixels=112 * 112,
        max_pixels=2304 * 28 * 28, patch_size=14, temporal_patch_size=2, merge_size=2,
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711]))


def _config(size: str, ids: dict[str, int], vocab_size: int) -> Json:
    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    up, side = pairs // 10, pairs // 6      # of the fastest pairs, so that neighbours of a column and row turn apart
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", dtype="bfloat16",
        tie_word_embeddings=True, image_token_id=ids[IMAGE_PAD], video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START], vision_end_token_id=ids[VISION_END], eos_token_id=ids[TURN_END],
        text_config=text | dict(
            model_type="qwen2_5_vl_text", vocab_size=vocab_size, hidden_act="silu", rms_norm_eps=1e-6,
            max_position_embeddings=8192, use_sliding_window=False, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=ids[TURN_END], pad_token_id=ids[END_OF_TEXT],
            rope_parameters=dict(rope_type="default", rope_theta=1000.0,
                                 mrope_section=[up, side, pairs - up - side])),
        vision_config=vision | dict(
            model_type="qwen2_5_vl", hidden_act="silu", in_chans=3, out_hidden_size=text["hidden_size"], patch_size=14,
            spatial_merge_size=2, temporal_patch_size=2, window_size=112, tokens_per_second=2))


def new_model(folder: Path, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """The folder's model with random float32 weights that suit its small sizes."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05 if "embed_tokens" in name else weight[0].numel() ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
                weight.data *= 0.3      # what adds to the residual stream
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.data *= 0.5      # attention starts wide
    return model


def save_weights(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """bfloat16 into model.safetensors; the tied head is the embedding and not stored."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous()
               for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write(file: Path, value: Json) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
