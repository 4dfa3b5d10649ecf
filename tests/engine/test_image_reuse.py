"""Which rows of a reused image are computed, copied and shared, worked out by hand."""
from __future__ import annotations

import math

import pytest

from nanovllm.engine.image_kv_table import ImageKVEntry
from nanovllm.engine.image_reuse import (
    ReusePlan,
    RowsOfImage,
    compress_ratios,
    copies_of_image,
    rows_of_image,
    shared_blocks,
    tiers_of,
)

Ratios = tuple[float, ...]


@pytest.mark.parametrize("ratio, compressed", [
    (0.0, None), (0, None), (1.0, None), (1, None), ((0.0, 0.0), None), ([1.0, 1.0], None), (0.05, (0.05,)),
    ([0.3, 0.3, 0.3], (0.3,)), ([1.0, 0.5, 0.0], (1.0, 0.5, 0.0)), ([1.0, 0.0], (1.0, 0.0))])
def test_ratios_that_reuse_nothing_are_none_and_equal_ones_are_one(ratio: object, compressed: Ratios | None) -> None:
    assert compress_ratios(ratio) == compressed     # type: ignore[arg-type]


def test_a_tier_is_a_run_of_layers_with_one_ratio() -> None:
    assert tiers_of((0.3,)) == ((0, 0.3),)
    assert tiers_of((1.0, 1.0, 0.5, 0.0, 0.0)) == ((0, 1.0), (2, 0.5), (3, 0.0))


@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.1, 0.25, 0.5, 0.999])
@pytest.mark.parametrize("n", [1, 2, 3, 10, 300, 1024])
def test_the_leading_rows_are_computed(ratio: float, n: int) -> None:
    rows = rows_of_image(50, 50 + n, (ratio,), hit_until=0, num_tokens=n + 60)
    assert rows.num_computed == math.ceil(ratio * n) and rows.skipped(0) == (50 + math.ceil(ratio * n), 50 + n)


def test_rows_of_a_hit_count_towards_the_leading_ones() -> None:
    def rows(hit_until: int) -> RowsOfImage:
        return rows_of_image(10, 30, (0.3,), hit_until, num_tokens=40)
    assert (rows(8).num_computed, rows(8).skipped(0)) == (6, (16, 30))
    assert (rows(12).num_computed, rows(12).skipped(0)) == (4, (16, 30))
    assert (rows(16).num_computed, rows(16).skipped(0)) == (0, (16, 30))
    assert (rows(20).num_computed, rows(20).skipped(0)) == (0, (20, 30))


def test_the_last_token_of_the_prompt_is_computed_also_as_an_image_token() -> None:
    rows = rows_of_image(5, 15, (0.3,), hit_until=0, num_tokens=15)
    assert rows.skipped(0) == (8, 14)
    assert not rows_of_image(5, 6, (0.3,), 0, num_tokens=6).reuses_any
    assert not rows_of_image(5, 7, (0.5,), 0, num_tokens=7).reuses_any
    assert rows_of_image(5, 15, (0.3,), 0, num_tokens=16).skipped(0) == (8, 15)


def test_deeper_tiers_compute_fewer_rows() -> None:
    rows = rows_of_image(10, 20, (1.0, 0.5, 0.0), hit_until=0, num_tokens=30)
    assert [rows.skipped(tier) for tier in range(3)] == [(20, 20), (15, 20), (10, 20)]
    assert rows.num_computed == 10 and rows.reuses_any
    assert rows_of_image(10, 20, (0.5, 0.5), 12, 30).skipped(0) == (15, 20)


def test_a_plan_adds_its_images_up() -> None:
    plan = ReusePlan((0, 1, 2), {
        1: rows_of_image(30, 40, (1.0, 0.5, 0.0), 0, 50), 0: rows_of_image(10, 20, (1.0, 0.5, 0.0), 12, 50)})
    assert plan.skips(0) == [] and plan.skips(1) == [(15, 20), (35, 40)] and plan.skips(2) == [(12, 20), (30, 40)]
    assert (plan.num_recomputed, plan.num_reused, plan.first_row) == (18, 0, 12)
    assert [plan.tier_at(layer) for layer in range(5)] == [0, 1, 2, 2, 2]


# ---------------------------------------------------------------- copies and shared blocks

def entry(start: int, stop: int) -> ImageKVEntry:
    """Rows [start, stop) in blocks of 4, numbered 100 and up."""
    blocks = [100 + i if i >= start // 4 else -1 for i in range(-(-stop // 4))]
    return ImageKVEntry(blocks, start, stop)


def test_moved_rows_are_one_copy_behind_the_computed_ones() -> None:
    rows = rows_of_image(13, 23, (0.3,), 0, 30)
    copy, = copies_of_image(rows, entry(2, 12), (0.3,), 11, range(8), (0, 0))
    assert (copy.source_start, copy.target_start, copy.num_tokens, copy.delta) == (5, 16, 7, 11)
    assert copy.source_blocks == (100, 101, 102) and copy.target_blocks == tuple(range(8)) and copy.first_rows == (0,)


def test_a_copy_starts_at_another_row_in_each_layer() -> None:
    ratios = (1.0, 0.5, 0.5, 0.0)
    rows = rows_of_image(13, 23, ratios, 0, 30)
    copy, = copies_of_image(rows, entry(2, 12), ratios, 11, range(8), (0, 0))
    assert (copy.source_start, copy.target_start, copy.num_tokens) == (2, 13, 10)
    assert copy.first_rows == (10, 5, 5, 0)


def test_rows_of_a_hit_are_not_copied_over() -> None:
    rows = rows_of_image(13, 23, (0.3, 0.0), 20, 30)
    copy, = copies_of_image(rows, entry(2, 12), (0.3, 0.0), 11, range(8), (0, 0))
    assert (copy.source_start, copy.target_start, copy.num_tokens, copy.first_rows) == (9, 20, 3, (0, 0))


@pytest.mark.parametrize("start, source, delta, ratio, shared", [
    (2, 2, 0, 0.1, [1, 2, 3, 4]),       # rows [4, 22) stand: blocks 1 to 4 wholly
    (6, 2, 0, 0.1, [2, 3, 4, 5]),       # a block further on, of a prompt whose positions did not move
    (2, 2, 1, 0.1, []),                 # moved
    (3, 2, 0, 0.1, []),                 # another place in the block
    (2, 2, 0, 0.5, [3, 4]),             # rows [12, 22) stand
    (2, 2, 0, 0.95, [])])
def test_whole_blocks_at_the_same_place_are_shared(
        start: int, source: int, delta: int, ratio: float, shared: list[int]) -> None:
    rows = rows_of_image(start, start + 20, (ratio,), 0, 60)
    assert list(shared_blocks(rows, entry(source, source + 20), delta, 4)) == shared


def test_a_row_that_any_layer_computes_keeps_its_block_unshared() -> None:
    rows = rows_of_image(4, 24, (0.5, 0.1), 0, 60)
    assert list(shared_blocks(rows, entry(4, 24), 0, 4)) == [4, 5]      # from row 14 on, not from row 6
    assert not list(shared_blocks(rows_of_image(4, 24, (1.0, 0.1), 0, 60), entry(4, 24), 0, 4))


def test_only_the_edges_of_shared_blocks_are_copied() -> None:
    rows = rows_of_image(2, 22, (0.05,), 0, 60)
    copies = copies_of_image(rows, entry(2, 22), (0.05,), 0, range(6), (4, 20))
    assert [(copy.source_start, copy.target_start, copy.num_tokens) for copy in copies] == [(3, 3, 1), (20, 20, 2)]


def test_deeper_layers_copy_what_lies_before_the_shared_blocks() -> None:
    ratios = (0.5, 0.0)
    rows = rows_of_image(2, 22, ratios, 0, 60)           # layer 0 takes [12, 22), layer 1 all of [2, 22)
    copies = copies_of_image(rows, entry(2, 22), ratios, 0, range(6), (12, 20))
    assert [(copy.target_start, copy.num_tokens, copy.first_rows) for copy in copies] == [
        (2, 10, (10, 0)), (20, 2, (0, 0))]


def test_nothing_is_copied_where_blocks_are_shared_from_edge_to_edge() -> None:
    rows = rows_of_image(4, 24, (0.2,), 0, 60)
    assert list(shared_blocks(rows, entry(4, 24), 0, 4)) == [2, 3, 4, 5]
    assert copies_of_image(rows, entry(4, 24), (0.2,), 0, range(6), (8, 24)) == []
