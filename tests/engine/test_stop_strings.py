"""Stop strings are found the moment they are complete, wherever token borders lie, and cut exactly."""
from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nanovllm.engine.stop_strings import WINDOW, StopStrings


class Pieces:
    """A tokenizer whose token i is the i-th piece; counts the tokens that it decodes."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return "".join(self.pieces[i] for i in token_ids)

    def first_found(self, stops: Sequence[str]) -> tuple[int, str] | None:
        """After how many tokens one was found, and the text before it."""
        search = StopStrings(stops, self.decode)
        for n in range(1, len(self.pieces) + 1):
            if search.found(range(n)):
                text = search.cut(self.decode(range(n)))
                assert text is not None
                return n, text
        return None


@pytest.mark.parametrize("pieces, stops, found", [
    (["a ", "E", "ND ", "b"], ["END"], (3, "a ")),              # across tokens, and its token goes on behind it
    (["a", "END"], ["END"], (2, "a")), (["END"], ["END"], (1, "")), (["E", "N", "D"], ["END"], (3, "")),
    (["aENDbENDc"], ["END"], (1, "a")), (["EN", "E", "ND"], ["END"], (3, "EN")),
    (["one", " two"], ["END", "two"], (2, "one ")), (["xyz"], ["yz", "xyz"], (1, "")),
    (["ab", "c"], ["bc", "b"], (1, "a")),
    (["E", "ND"], ["end"], None), (["E", "N"], ["END"], None), (["a\n", "\nb"], ["\n\n"], (2, "a"))])
def test_found_when_complete_and_cut_before_it(
        pieces: list[str], stops: list[str], found: tuple[int, str] | None) -> None:
    assert Pieces(pieces).first_found(stops) == found


def test_the_same_as_a_search_of_the_whole_text() -> None:
    rng = random.Random(0)
    for _ in range(200):
        pieces = ["".join(rng.choices("abc", k=rng.choice([0, 1, 1, 2, 5]))) for _ in range(rng.randrange(1, 400))]
        stops = ["".join(rng.choices("abc", k=rng.randrange(4, 9))) for _ in range(rng.randrange(1, 3))]
        expected = None
        for n in range(1, len(pieces) + 1):
            text = "".join(pieces[:n])
            places = [text.find(stop) for stop in stops if stop in text]
            if places:
                expected = n, text[:min(places)]
                break
        assert Pieces(pieces).first_found(stops) == expected


def test_a_stop_string_longer_than_the_window_far_into_a_long_text() -> None:
    stop = "".join(chr(97 + i % 26) for i in range(3 * WINDOW))
    pieces = ["x"] * 2000 + list(stop) + ["y"]
    assert Pieces(pieces).first_found([stop]) == (2000 + len(stop), "x" * 2000)


def test_a_long_text_costs_no_more_for_each_token_than_a_short_one() -> None:
    costs = []
    for length in (1000, 4000):
        pieces = Pieces(["abcd"] * length)
        assert pieces.first_found(["END"]) is None
        costs.append(pieces.num_decoded / length)
    assert costs[1] < 1.2 * costs[0] < 200


def test_a_tail_that_decodes_differently_on_its_own_is_no_stop() -> None:
    """Some tokenizers write a word's first piece without its space if nothing stands before it."""
    search = StopStrings([" END"], lambda ids: "a END" if ids[0] else "a sEND")
    search.start = 1
    assert not search.found([0, 1, 2])


def test_stop_strings_within_the_first_tokens_are_text_like_any_other():
    pieces = ["a", "END", "b", "EN", "D", "c"]
    ids = list(range(len(pieces)))

    def decode(token_ids):
        return "".join(pieces[i] for i in token_ids)

    for min_tokens, stops_at, text in ((0, 2, "a"), (1, 2, "a"), (2, 5, "aENDb"), (4, 5, "aENDb"), (5, None, None)):
        stops = StopStrings(["END"], decode, min_tokens)
        assert stops.cut(decode(ids[:1])) is None
        found = [n for n in range(1, len(ids) + 1) if stops.found(ids[:n])]
        assert found[:1] == ([] if stops_at is None else [stops_at])
        assert stops.cut(decode(ids[:stops_at])) == text


def test_most_tokens_are_decoded_once_however_often_they_come():
    pieces = Pieces(["abcd", "xyz "] * 1000 + ["E", "N", "D"])
    alone = []

    def decode_one(token_id):
        alone.append(token_id)
        return pieces.pieces[token_id]

    search = StopStrings(["END"], pieces.decode, decode_one=decode_one)
    assert [n for n in range(1, 2004) if search.found(range(n))] == [2003]
    assert len(alone) == 2003 and pieces.num_decoded < 10_000


def test_a_stop_string_may_end_in_a_character_of_two_tokens():
    pieces = [b"a", b"\xc3", b"\xa9", b"b"]
    search = StopStrings(["\u00e9"], lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace"))
    assert [search.found(range(n)) for n in range(1, 4)] == [False, False, True]


def test_a_stop_string_may_end_in_a_space_that_a_token_alone_is_decoded_without():
    pieces = ["b", "a", " ", "c"]
    search = StopStrings(["a "], lambda ids: "".join(pieces[i] for i in ids).strip(" " if len(ids) == 1 else ""))
    assert [search.found(range(n)) for n in range(1, 4)] == [False, False, True]
