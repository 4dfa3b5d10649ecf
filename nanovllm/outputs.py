"""What a finished request hands back."""
from __future__ import annotations

from typing import TypedDict


class RequestOutput(TypedDict, total=False):
    """One finished request; `logprobs` and `error` are there only when asked for, or when there is one."""

    seq_id: int
    text: str                        # decoded without special tokens, the id that stopped it, and any stop string
    token_ids: list[int]             # all generated ids, with the one that stopped it
    finish_reason: str               # "stop", "length", "abort", or "error" with the reason in `error`
    ttft: float                      # seconds from the call that brought the request to its first id; 0 if none came
    hash_time: float                 # seconds that it waited for its pixels to be hashed, part of ttft
    vit_time: float                  # seconds of vision encoding for it; 0 when nothing had to be encoded
    num_prompt_tokens: int
    num_cached_tokens: int           # of the prompt, taken from the prefix cache
    num_reused_tokens: int           # image tokens whose KV was taken from the image-KV table
    num_recomputed_image_tokens: int # leading tokens of those images that were computed again
    logprobs: list[dict[int, float]] # per generated token {token id: log-probability} of the raw logits
    error: str
