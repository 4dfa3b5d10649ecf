"""The oracle itself: equal to transformers on both architectures, and to itself where overrides must change nothing."""
from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoints import make_qwen2_5_vl, make_qwen3
from tests.oracle import Oracle, Override
from tests.prompts import picture, prompt, text, video


@pytest.mark.parametrize("options", [
    dict(tie=True), dict(attention_bias=True, head_dim=16, num_shards=2, new_config=True, vocab_padding=5)])
@torch.inference_mode()
def test_qwen3_equals_transformers(tmp_path, options):
    folder = make_qwen3(tmp_path, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = prompt(text(50))
    expected = model(torch.tensor([words.token_ids])).logits[0]
    torch.testing.assert_close(Oracle(folder).forward(words).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(tie=True, new_names=True, new_config=True)])
@torch.inference_mode()
def test_qwen2_5_vl_equals_transformers(tmp_path, options):
    folder = make_qwen2_5_vl(tmp_path, **options)
    oracle, model = Oracle(folder), AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    mixed = prompt(text(5), picture(140, 224), text(3), video(3, 56, 84, 0.5), picture(56, 56), text(4))
    inputs = {name: value for name, value in mixed.mm_inputs.items() if name != "second_per_grid_ts"}
    expected = model(torch.tensor([mixed.token_ids]), position_ids=oracle.positions(mixed)[:, None], **inputs).logits[0]
    torch.testing.assert_close(oracle.forward(mixed).logits, expected, rtol=0, atol=1e-4)


def test_overrides_with_the_computed_rows_change_nothing(tmp_path):
    oracle, image = Oracle(make_qwen2_5_vl(tmp_path)), picture(112, 112)
    words = prompt(text(7), image, text(9))
    plain, start = oracle.forward(words), words.pictures[0][0]
    same = oracle.forward(words, overrides=[Override(start, plain.rows[start:start + 16], [5, 2, 0])])
    torch.testing.assert_close(same.logits[start + 16:], plain.logits[start + 16:], rtol=0, atol=1e-5)


def test_overrides_count_from_their_first_row_of_each_layer(tmp_path):
    oracle, image = Oracle(make_qwen2_5_vl(tmp_path)), picture(112, 112)
    words, other = prompt(text(7), image, text(9)), prompt(text(20, seed=1), image)
    start, donor = words.pictures[0][0], other.pictures[0][0]
    rows = oracle.forward(other).rows[donor:donor + 16]
    plain, changed = oracle.forward(words), oracle.forward(words, overrides=[Override(start, rows, [16, 16, 3])])
    assert torch.equal(changed.rows.keys[:2], plain.rows.keys[:2])
    assert torch.equal(changed.rows.keys[2, :start + 3], plain.rows.keys[2, :start + 3])
    assert torch.equal(changed.rows.keys[2, start + 3:start + 16], rows.keys[2, 3:])
    assert not torch.allclose(changed.logits[-1], plain.logits[-1], atol=1e-3)
