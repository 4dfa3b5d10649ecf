"""Finds a request's stop strings in its text as tokens arrive, also across token borders."""
from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

WINDOW = 64      # characters that are looked at again beside the length of the longest stop string


class StopStrings:
    """Looks at the decoded tail only, so that a long text costs no more per token than a short one.

    A stop string that ends within the first `min_tokens` tokens is text like any other. `decode_one` gives the text of
    one id alone, and may remember it: most tokens are seen by it to end no stop string.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, min_tokens: int = 0,
                 decode_one: Callable[[int], str] | None = None) -> None:
        self.stops = stops
        self.decode = decode
        self.decode_one = decode_one or (lambda token_id: decode([token_id]))
        self.min_tokens = min_tokens
        # A token that completes a character has no whole one alone; some tokenizers write none of its spaces, then.
        self.ends = {stop[-1] for stop in stops} | {"\ufffd"}
        self.free_text: int | None = None if min_tokens else 0      # characters of those tokens, once they are there
        self.longest = max(map(len, stops))
        self.start = 0          # tokens before it can no longer be part of a stop string

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of all generated ids holds a stop string, given that one token fewer did not."""
        if len(token_ids) <= self.min_tokens:
            return False
        if " " not in self.ends and self.ends.isdisjoint(self.decode_one(token_ids[-1])):
            return False
        if self.free_text is None:
            self.free_text = len(self.decode(token_ids[:self.min_tokens]))
        tail = self.decode(token_ids[self.start:])
        if any(stop in tail for stop in self.stops) and self.cut(self.decode(token_ids)) is not None:
            return True
        half = (self.start + len(token_ids)) // 2
        if len(tail) > 2 * (self.longest + WINDOW) and len(self.decode(token_ids[half:])) > self.longest + WINDOW:
            self.start = half
        return False

    def cut(self, text: str) -> str | None:
        """The text before the first stop string in it that counts; None if there is none."""
        if self.free_text is None:
            return None
        firsts = [text.find(stop, max(0, self.free_text - len(stop) + 1)) for stop in self.stops]
        places = [place for place in firsts if place >= 0]
        return text[:min(places)] if places else None
