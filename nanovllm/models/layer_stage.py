"""Which rows of a step each decoder layer computes: the form in which a model takes a plan's stages and logits rows."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanovllm.attention.contract import SpanBatch


@dataclass(frozen=True)
class LayerStage:
    """From layer `first_layer` on, go on with `rows` of the rows of the stage before and attend as `spans` say."""

    first_layer: int
    rows: Tensor | None         # int64 [rows of this stage], indices into the previous stage's rows; None: all of them
    spans: SpanBatch


@dataclass(frozen=True)
class FinalRows:
    """The rows whose final hidden states are wanted: in the last layer only they attend, of the others KV is stored."""

    rows: Tensor                # int64 [wanted], indices into the last stage's rows
    spans: SpanBatch            # one query each; its slots are not used
