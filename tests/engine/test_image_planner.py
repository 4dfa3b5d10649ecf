"""Which images are encoded, how often, and that encoder cache blocks come back whatever happens."""
from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

import pytest

from tests.engine.harness import Harness
from tests.engine.reference import Picture, greedy, solo_tokens

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
CAT, DOG, TOWN = Picture(1, 16), Picture(2, 16), Picture(3, 25)


def calls(engine: Harness, picture: Picture) -> int:
    return sum(n for key, n in engine.device.num_encoded.items() if key[2] == picture.pixels)


def is_right(engine: Harness, parts: SequenceOf[int | Picture]) -> bool:
    return engine.generate(parts).completion_token_ids == solo_tokens(parts, greedy(), 4)


@OVERLAP
@pytest.mark.parametrize("budget", [4, 7, 18, 64])
def test_an_image_computed_in_chunks_is_encoded_once(budget: int, overlap: bool) -> None:
    engine = Harness(max_num_batched_tokens=budget, overlap=overlap)
    assert is_right(engine, [1, 2, CAT, 3]) and calls(engine, CAT) == 1


@OVERLAP
def test_requests_of_one_step_and_of_later_ones_share_an_encoding(overlap: bool) -> None:
    engine = Harness(max_num_batched_tokens=40, overlap=overlap, enable_prefix_caching=False)
    for i in range(4):
        engine.add([i, CAT, 5])
    engine.run()
    assert is_right(engine, [9, 9, CAT]) and calls(engine, CAT) == 1


def test_an_image_wholly_in_cached_blocks_is_not_encoded_again() -> None:
    engine = Harness(encoder_blocks=0)
    parts = [1, CAT, *range(10)]
    assert is_right(engine, parts) and is_right(engine, parts) and is_right(engine, [1, CAT, *range(5), 30])
    assert calls(engine, CAT) == 1


def test_an_image_cut_by_the_cache_border_gets_the_right_rows() -> None:
    engine = Harness(block_size=8)
    for tail in ([], [3], [4, 5]):
        assert is_right(engine, [1, 2, TOWN, *tail])
    assert calls(engine, TOWN) == 1


@OVERLAP
def test_an_image_larger_than_the_encoder_cache_is_encoded_for_each_step(
        overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = Harness(encoder_blocks=3, max_num_batched_tokens=10, overlap=overlap)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert is_right(engine, [1, CAT, 2])
    assert calls(engine, CAT) == 2 and not engine.encoder_cache.entries
    assert "16 tokens finds no room" in caplog.text and "encoder_cache_ratio" in caplog.text


@OVERLAP
def test_two_images_that_do_not_fit_the_encoder_cache_together(overlap: bool) -> None:
    """Rows pinned by one chunk leave no room for the next image, which is then encoded uncached."""
    engine = Harness(encoder_blocks=5, max_num_batched_tokens=20, overlap=overlap)
    assert is_right(engine, [CAT, DOG, 1]) and is_right(engine, [DOG, 2, CAT, 1])


def test_encoder_rows_are_kept_for_those_who_wait_for_kv_blocks() -> None:
    engine = Harness(num_blocks=12, encoder_blocks=5)
    parts = [[1, 2, CAT], [3, 4, CAT], [5, DOG], [6, TOWN]]
    seqs = [engine.add(p) for p in parts]
    engine.run(max_steps=60)
    assert all(seq.completion_token_ids == solo_tokens(p, greedy(), 4) for seq, p in zip(seqs, parts))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_failed_step_gives_back_what_it_was_to_encode(num_steps: int) -> None:
    """Two chunks of one image in flight, the second of which reads what the first one encodes."""
    engine = Harness(max_num_batched_tokens=6, overlap=True)
    seq = engine.add([1, CAT, 2])
    for _ in range(num_steps):
        engine.step()
    engine.fail_step()
    engine.run()
    assert seq.completion_token_ids == solo_tokens([1, CAT, 2], greedy(), 4)


@OVERLAP
def test_images_of_every_size_in_every_order(overlap: bool) -> None:
    engine = Harness(max_num_batched_tokens=7, overlap=overlap)
    small, wide, large = Picture(1, 1), Picture(2, 10), Picture(3, 16)
    for parts in ([small, wide, large], [large, wide, small], [wide, small, 1, large], [wide, large, small, small]):
        assert is_right(engine, parts)
