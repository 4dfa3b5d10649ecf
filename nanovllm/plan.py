"""What one step computes, in numbers only: policy writes a `StepPlan`, the runner answers with a `StepResult`."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Rows of (query range, KV length, block table): span `i` asks with the tokens
    `starts[i] .. starts[i] + lengths[i] - 1` of its sequence and sees all KV up to and including its last token."""

    starts: IntArray          # [spans] position in the sequence of the first query token
    lengths: IntArray         # [spans] number of query tokens, never 0
    block_tables: NDArray[np.int32]   # [spans, width] block ids; columns behind a span's KV hold any valid id
    seq_rows: IntArray        # [spans] the batch row that the span's sequence holds; those of one row have one table


@dataclass(frozen=True, slots=True)
class Stage:
    """The spans computed from decoder layer `first_layer` on; `rows` picks them out of the rows of the stage before."""

    first_layer: int
    rows: IntArray | None     # [rows of this stage] indices into the previous stage's rows; None in stage 0
    spans: SpanTable


@dataclass(frozen=True, slots=True)
class ImageEncode:
    """One image or video to run through the vision tower in this step."""

    key: Hashable
    grid: tuple[int, int, int]             # (t, h, w) in patches
    pixels: Any                            # CPU tensor or array [t * h * w, patch_dim]
    block_ids: tuple[int, ...] | None      # where its rows go in the encoder cache; None: used in this step only
    seq_id: int                            # the request whose vit_time it counts towards


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Encoder rows [`first`, `stop`) of one image replace the embeddings from row `target` of the step on."""

    key: Hashable
    num_rows: int                          # rows of the whole image
    block_ids: tuple[int, ...] | None      # where they lie in the encoder cache; None: encoded by this step
    first: int
    stop: int
    target: int


@dataclass(frozen=True, slots=True)
class KVCopy:
    """KV of some tokens goes from one block table to another, keys turned by `delta` positions on every axis."""

    source_blocks: tuple[int, ...]
    source_start: int                      # index in the source sequence of the first token
    target_blocks: tuple[int, ...]
    target_start: int                      # index in the target sequence of the first token
    num_tokens: int
    delta: int
    first_rows: tuple[int, ...]            # per decoder layer (or one for all): rows before it are left alone


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to draw the next token of each span that wants logits; every array is [rows]."""

    temperature: NDArray[np.float32]
    top_k: IntArray                        # 0: off
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: IntArray
    token_index: IntArray                  # how many tokens this request has produced: the random stream's counter
    repetition_penalty: NDArray[np.float32]
    seq_rows: IntArray                     # the batch row that the sequence holds for as long as it runs
    banned: tuple[tuple[int, tuple[int, ...]], ...] = ()      # (row, token ids) not to be sampled yet (min_tokens)
    num_logprobs: tuple[int | None, ...] = ()                 # empty: nobody asked; -1: whole vocabulary


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: copies first, then images, then all spans through the layers, then logits of `logits_rows`."""

    token_ids: IntArray                    # [tokens] of stage 0
    positions: IntArray                    # [axes, tokens]; 1 axis for text models, 3 (t, h, w) for M-RoPE
    stages: tuple[Stage, ...]
    logits_rows: IntArray                  # [rows] indices into the last stage's rows
    sampling: SamplingBatch
    # [2, n] (token of the step, batch row): ids that only the device knows yet, the last that the row sampled
    fed: IntArray = field(default_factory=lambda: np.zeros((2, 0), np.int64))
    encodes: tuple[ImageEncode, ...] = ()
    image_rows: tuple[ImageRows, ...] = ()
    copies: tuple[KVCopy, ...] = ()
    penalty_resets: tuple[tuple[int, IntArray], ...] = ()     # (batch row, all ids so far) of a request new to its row


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host needs to know of a step, row by row of `StepPlan.logits_rows`."""

    token_ids: IntArray                    # [rows]
    finite: NDArray[np.bool_]              # [rows] False: the logits held a NaN or no finite value
    logprobs: list[dict[int, float] | None] | None = None
    encode_seconds: dict[int, float] = field(default_factory=dict)    # seq_id -> seconds of vision encoding
