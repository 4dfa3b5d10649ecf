"""Requests that name their images and bring no pixels: served while what they need is cached, else told so."""
from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm.metrics import Usage
from tests.engine.harness import Harness
from tests.engine.reference import Picture

DOG = Picture(2, 6)
NAMED = Picture(1, 10, is_named=True)
NAME_ONLY = replace(NAMED, has_pixels=False)


def test_a_name_alone_serves_while_what_it_needs_is_cached() -> None:
    harness = Harness(recompute_ratio=0.3)
    with pytest.raises(ValueError, match=r"image 0 .*image_hashes: 1.*pass its pixel_values"):
        harness.add([1, NAME_ONLY, 2])
    harness.generate([1, NAMED, 2])
    assert harness.usage([3, 3, NAME_ONLY, 2]).reused == 7
    assert harness.usage([4, NAME_ONLY, 2], recompute_ratio=0.0).reused == 0       # from its encoder rows
    harness.encoder_cache.clear()
    with pytest.raises(ValueError, match="pass its pixel_values"):
        harness.add([5, 5, NAME_ONLY, 2])
    assert harness.usage([1, NAME_ONLY, 2, 2, 2]) == Usage(12, 0, 0, 0, 0)


def test_a_waiting_name_keeps_what_it_needs_and_the_youngest_gives_way() -> None:
    harness = Harness(recompute_ratio=0.3, num_blocks=12, max_num_seqs=1)
    harness.generate([1, NAMED, 2], max_tokens=1)
    harness.add(list(range(20)), max_tokens=29)              # needs all 12 blocks in the end
    seqs = [harness.add([3, 3, NAME_ONLY, 2]) for _ in range(2)]
    assert all(seq.held_blocks for seq in seqs)
    harness.run()
    assert [seq.finish_reason for seq in seqs] == ["error", "error"]
    assert "[1]" in str(seqs[0].error) and "pixel_values" in str(seqs[0].error)
    assert harness.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("num_blocks, first_tokens, text, ends", [
    (10, 9, 5, "error"), (12, 16, 1, "error"), (14, 17, 5, "error"), (16, 12, 1, "length"), (17, 20, 5, "length")])
def test_a_preempted_name_never_evicts_what_it_needs_itself(
        num_blocks: int, first_tokens: int, text: int, ends: str) -> None:
    """It comes back when its entry's blocks are the only ones left to evict, and its encoder rows are gone."""
    harness = Harness(recompute_ratio=0.2, num_blocks=num_blocks, encoder_blocks=3, max_model_len=64)
    others = [harness.add(list(range(text)), max_tokens=30), harness.add([1, NAMED, 2], max_tokens=first_tokens)]
    harness.step()
    seq = harness.add([8, 8, NAME_ONLY, 2], max_tokens=12)
    while not seq.num_completion_tokens:
        harness.step()
    harness.encoder_cache.clear()
    while not seq.is_finished:      # the device has no pixels to encode
        harness.step()
        assert not seq.held_blocks, "a preempted request stands in the way of others"
    harness.run()
    assert seq.finish_reason == ends and (ends == "length" or "[1]" in str(seq.error) or ": 1" in str(seq.error))
    assert harness.scheduler.stats.preemptions > 0 or ends == "length"
    assert [other.finish_reason for other in others] == ["length", "length"]


def test_a_preempted_name_that_can_never_come_back_ends_with_an_error() -> None:
    """Its first block is a hit with the rows to recompute, but the pool does not hold the entry beside its blocks."""
    harness = Harness(recompute_ratio=0.2, num_blocks=8)
    harness.generate([1, NAMED, 2], max_tokens=1)
    seq = harness.add([8, 8, NAME_ONLY, 2], max_tokens=19)
    while len(seq) < 30:
        harness.step()
    harness.encoder_cache.clear()
    harness.scheduler.requeue(seq)
    harness.shorten_prefixes(1)
    other = harness.add([1, NAMED, 2], max_tokens=1)
    harness.scheduler.waiting.rotate(1)
    harness.step()
    assert other.is_finished and harness.live_entries()
    harness.encoder_cache.clear()
    harness.run()
    assert seq.finish_reason == "error" and "[1]" in str(seq.error)


def test_the_last_row_of_an_image_at_the_end_needs_encoder_rows() -> None:
    harness = Harness(recompute_ratio=0.2)
    harness.generate([1, 2, NAMED])
    harness.shorten_prefixes(1)                                # the rows to recompute are a hit, the last one is not
    assert harness.usage([1, 2, NAME_ONLY, 3, 4]).reused == 8
    harness.shorten_prefixes(1)
    harness.encoder_cache.clear()
    assert harness.usage([1, 2, NAME_ONLY, 5, 6]).reused == 8
    harness.shorten_prefixes(1)
    with pytest.raises(ValueError, match="pass its pixel_values"):
        harness.add([1, 2, NAME_ONLY])


def test_a_name_whose_rows_are_there_needs_no_entry() -> None:
    """The pool cannot hold the entry beside the request; the image is computed from its encoder rows."""
    harness = Harness(recompute_ratio=0.3, num_blocks=5, enable_prefix_caching=False)
    harness.generate([1, NAMED, 2], max_tokens=1)
    seq = harness.generate([3, 3, 3, NAME_ONLY, 2], max_tokens=4)
    assert seq.finish_reason == "length" and seq.usage == Usage(0, 0, 0, 0, 1)
