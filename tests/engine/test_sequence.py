"""What a sequence knows of its tokens, images and KV."""
from __future__ import annotations

import pytest

from nanovllm.engine.image_reuse import ReusePlan, rows_of_image
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.engine.reference import Picture, greedy, make_sequence

PAD = 9


def test_tokens_and_ids() -> None:
    given = [1, 2, 3]
    seq, other = Sequence(given, SamplingParams()), Sequence([1], SamplingParams())
    assert other.seq_id > seq.seq_id and seq.status is SequenceStatus.WAITING and not seq.is_finished
    seq.append_token(4)
    assert (len(seq), seq.num_tokens, seq.num_completion_tokens, seq.completion_token_ids) == (4, 4, 1, [4])
    seq.num_pending = 1
    assert (len(seq), seq.num_tokens) == (4, 5) and given == [1, 2, 3]


def test_images_named_by_hash_are_found_in_the_prompt() -> None:
    seq = Sequence([1, PAD, PAD, 2, PAD, 3], SamplingParams(), None, [11, 22])
    assert not seq.images_known and seq.image_token_range is None
    seq.find_image_token_range(PAD)
    assert seq.images_known and seq.image_token_range == (1, 3)
    assert [(image.key, image.start, image.stop) for image in seq.images] == [(11, 1, 3), (22, 4, 5)]
    assert seq.image_hashes == [11, 22]


@pytest.mark.parametrize("ids, runs", [([1, 2], 0), ([PAD, 1, PAD], 2)])
def test_as_many_hashes_as_runs_of_placeholders(ids: list[int], runs: int) -> None:
    with pytest.raises(ValueError, match=f"1 image hashes for {runs} runs of placeholder {PAD}"):
        Sequence(ids, SamplingParams(), None, [11]).find_image_token_range(PAD)


def test_generated_placeholders_are_no_image() -> None:
    seq = Sequence([1, PAD, 2], SamplingParams(), None, [11])
    seq.append_token(PAD)
    seq.find_image_token_range(PAD)
    assert seq.image_token_range == (1, 2)


def test_positions_of_tokens() -> None:
    video = Picture(1, 2, interval=0.5, frames=4)            # two merged rows a grid at t = 0, 0, 1, 1
    seq = make_sequence([1, video, 2], greedy())
    assert [seq.position_of(i) for i in range(12)] == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 5]
    assert [make_sequence([1, 2], greedy()).position_of(i) for i in range(4)] == [0, 1, 2, 3]


def test_where_approximation_begins() -> None:
    seq = make_sequence([1, Picture(1, 10), 2, Picture(2, 10), 3], greedy())
    assert seq.approximate_from is None and seq.is_computed_in_full(0) and seq.is_computed_in_full(1)
    seq.reuse = ReusePlan((0,), {1: rows_of_image(12, 22, (0.3,), 0, 23)})
    assert seq.approximate_from == 15 and seq.is_computed_in_full(0) and not seq.is_computed_in_full(1)
    assert (seq.num_recompute_tokens, seq.num_reused_tokens) == (3, 7)
    seq.approximate = (4, 8)
    assert seq.approximate_from == 4 and not seq.is_computed_in_full(0)
    seq.forget_kv()
    assert seq.approximate_from is None and seq.num_reused_tokens == 0
