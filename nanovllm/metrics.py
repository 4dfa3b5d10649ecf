"""Counters that say where tokens came from: computed, cached or reused."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the KV of one request's prompt came from, in tokens, at its first admission."""

    cached: int            # prefix-cache hits
    reused: int            # image rows taken from the image-KV table
    recomputed: int        # leading rows of those images that were computed again
    images_reused: int
    images_missed: int     # images that would have been reused but were not in the table


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made."""

    requests: int = 0
    prefix_hits: int = 0           # requests that took tokens from the prefix cache
    cached_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    image_kv_hits: int = 0
    image_kv_misses: int = 0
    preemptions: int = 0

    def count_admission(self, usage: Usage, times: int = 1) -> None:
        """`times` -1 takes one back."""
        self.requests += times
        self.prefix_hits += times * (usage.cached > 0)
        self.cached_tokens += times * usage.cached
        self.reused_tokens += times * usage.reused
        self.image_kv_hits += times * usage.images_reused
        self.image_kv_misses += times * usage.images_missed
