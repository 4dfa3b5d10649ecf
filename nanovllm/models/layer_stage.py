"""From which decoder layer on which rows are computed: the form in which a model takes the stages of a step."""
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
