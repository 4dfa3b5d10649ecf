"""What the scheduler has decided for one step, kept until the host has seen its result."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from nanovllm.engine.sequence import Range, Sequence
from nanovllm.plan import ImageEncode, ImageRows, KVCopy


@dataclass(slots=True)
class ScheduledSeq:
    """A sequence's share of a step."""

    seq: Sequence
    spans: list[Range]          # ranges of its tokens that are computed, in order
    end: int                    # where `num_computed` stands when the step is done
    samples: bool               # its last known token is computed, so it gets the next one
    token_index: int            # of the token that it samples, counted from the end of the prompt
    resets_row: bool            # it has not sampled since it took its batch row, or since a step failed


@dataclass(slots=True)
class ScheduledStep:
    entries: list[ScheduledSeq] = field(default_factory=list)
    num_tokens: int = 0
    is_prefill: bool = False
    copies: list[KVCopy] = field(default_factory=list)
    encodes: list[ImageEncode] = field(default_factory=list)
    image_rows: list[ImageRows] = field(default_factory=list)
    encoding: dict[Hashable, tuple[int, ...] | None] = field(default_factory=dict)    # key -> encoder cache blocks
    pinned: list[Hashable] = field(default_factory=list)      # encoder cache keys read by this step

    @property
    def seqs(self) -> list[Sequence]:
        return [entry.seq for entry in self.entries]


def uncovered(start: int, stop: int, skips: list[Range]) -> list[Range]:
    """The parts of [start, stop) that no range of `skips` (in order, apart) covers."""
    parts = []
    for a, b in skips:
        if start < min(a, stop):
            parts.append((start, min(a, stop)))
        start = max(start, b)
    if start < stop:
        parts.append((start, stop))
    return parts


def take_rows(start: int, stop: int, skips: list[Range], room: int) -> tuple[list[Range], int]:
    """Ranges of at most `room` rows of [start, stop) that are not skipped, and where the next ones would begin."""
    spans: list[Range] = []
    for a, b in uncovered(start, stop, skips):
        if room == 0:
            return spans, a
        taken = min(b, a + room)
        spans.append((a, taken))
        room -= taken - a
        if taken < b:
            return spans, taken
    return spans, stop
