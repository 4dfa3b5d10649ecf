"""The packed forward pass gives what transformers gives for each sequence alone, on the pictures the processor sees."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

from nanovllm.quality.pictures import draw
from nanovllm.quality.shapes import KINDS, held_out, without_pictures
from tools.shapes.batches import (
    Encoder,
    batches,
    batches_of,
    conversation_of,
    draw_conversation,
    text_of,
)
from tools.shapes.folder import make_tokenizer, new_model, write_folder
from tools.shapes.packed import PackedModel, learning_rate, losses, right_by_kind
from tools.shapes.progress import Progress, resume, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes")
    write_folder(path, "tiny")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    return new_model(folder, seed=1).eval()


def test_packed_rows_equal_transformers(folder: Path, model: Qwen2_5_VLForConditionalGeneration) -> None:
    rng, encoder = random.Random(2), Encoder(make_tokenizer())
    conversations = [draw_conversation(rng) for _ in range(4)] + [conversation_of(asked) for asked in held_out(1)]
    [batch] = batches_of(encoder, conversations, 5, 12)
    processor = AutoProcessor.from_pretrained(folder)
    with torch.inference_mode():
        packed = PackedModel(model, 49)(batch)[0]
        for conversation in conversations:
            inputs = processor(text=[text_of(conversation)], return_tensors="pt", images=[
                Image.fromarray(picture.numpy()) for picture in draw(conversation.scenes)])
            expected = model(**inputs).logits[0]
            ids = inputs["input_ids"][0]
            row, start = next((row, start) for row in range(5) for start in batch.sequence[row].unique().tolist()
                              if start >= 0 and torch.equal(batch.ids[row, start:start + len(ids)], ids))
            torch.testing.assert_close(packed[row, start:start + len(ids)], expected, atol=2e-3, rtol=1e-3)


def test_chat_template_writes_the_same_text(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    for asked in held_out(1):
        pictures = [{"type": "image", "image": Image.new("RGB", (112, 112))} for _ in asked.scenes]
        question = {"type": "text", "text": asked.question}
        before = [{"type": "text", "text": asked.before}] if asked.before else []
        content = before + ([question, *pictures] if asked.question_first else [*pictures, question])
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        assert text_of(conversation_of(asked)).startswith(text)
        assert text_of(conversation_of(asked)) == f"{text}{asked.answer}<|im_end|>\n"


def test_targets_are_the_answers_alone() -> None:
    tokenizer = make_tokenizer()
    rng = random.Random(3)
    for _ in range(20):
        conversation = draw_conversation(rng)
        encoded = Encoder(tokenizer)(conversation)
        assert len(encoded.ids) == len(encoded.targets) == len(encoded.kinds) == len(encoded.positions)
        answers = tokenizer.decode([token for token in encoded.targets if token >= 0])
        assert answers == "".join(f"{turn.answer}<|im_end|>" for turn in conversation.turns)
        assert [KINDS[kind] for kind in encoded.kinds if kind >= 0] == [turn.kind for turn in conversation.turns]


def test_batches_are_seeded_and_full() -> None:
    encoder = Encoder(make_tokenizer())
    first, again, other = (next(batches(encoder, 4, 18, seed)) for seed in ("1", "1", "2"))
    assert torch.equal(first.ids, again.ids) and not torch.equal(first.ids, other.ids)
    assert (first.sequence >= 0).float().mean() > 0.6
    shown, cells = first.source >= 0, first.cell
    assert shown.sum() == (first.scene >= 0).sum() // 4 and (cells >= 0).sum() <= shown.sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_pictures_are_never_trained_on(seed: int) -> None:
    held = {scene for asked in held_out(50, seed) for scene in asked.scenes}
    for name in ("0 1 0", f"{seed} 1 0", f"{seed} 2 1"):        # as workers of training runs draw
        rng = random.Random(name)
        assert held.isdisjoint(scene for _ in range(200) for scene in draw_conversation(rng).scenes)
    assert held.isdisjoint(scene for asked in held_out(50, seed + 1) for scene in asked.scenes)


def test_grey_pictures_have_no_cells() -> None:
    asked = [conversation_of(without_pictures(each)) for each in held_out(1)]
    [batch] = batches_of(Encoder(make_tokenizer()), asked, 5, 16)
    assert (batch.cell < 0).all()


def test_a_leg_takes_up_where_the_last_one_ended(folder: Path, tmp_path: Path) -> None:
    [batch] = batches_of(Encoder(make_tokenizer()), [conversation_of(asked) for asked in held_out(1)], 8, 32)
    packed = PackedModel(new_model(folder, seed=1), 49)
    assert resume(tmp_path, packed) == Progress()
    sum(losses(*packed(batch), batch)).backward()
    torch.optim.AdamW(packed.parameters(), lr=1e-3).step()
    save(tmp_path, packed, Progress(1, 2.5, 1))
    other = PackedModel(new_model(folder, seed=2), 49)
    assert resume(tmp_path, other) == Progress(1, 2.5, 1)
    with torch.inference_mode():
        assert all(map(torch.equal, other(batch), packed(batch)))


def test_right_answers_are_counted_by_kind(model: Qwen2_5_VLForConditionalGeneration) -> None:
    [batch] = batches_of(Encoder(make_tokenizer()), [conversation_of(asked) for asked in held_out(2)], 8, 32)
    perfect = torch.nn.functional.one_hot(batch.targets.clamp(min=0), 900).float()
    assert right_by_kind(perfect, batch, len(KINDS)).tolist() == [[2, 2]] * len(KINDS)
    assert right_by_kind(-perfect, batch, len(KINDS))[:, 0].sum() == 0


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(seconds, 100, step, 1.0) for seconds, step in ((0, 0), (10, 500), (50, 900), (100, 2000))]
    assert rates[0] < 0.01 and rates[1] > 0.9 and 0.4 < rates[2] < 0.6 and rates[3] == pytest.approx(0.02)
