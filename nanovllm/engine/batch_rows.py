"""One row of numbers for each running sequence, so that a step is planned by indexing arrays."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nanovllm.plan import IntArray

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Sequence

INT64_LIMIT = 2**63


class BatchRows:
    """A sequence takes a row when it starts to run and gives it back when it stops.

    What never changes while it runs (sampling) is written once; its block table grows by the blocks it gains.
    """

    def __init__(self, max_num_seqs: int, max_num_blocks: int, seed: int | None) -> None:
        self.free = list(range(max_num_seqs - 1, -1, -1))
        self.block_tables = np.zeros((max_num_seqs, max_num_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self.wants_logprobs = np.zeros(max_num_seqs, bool)
        self.position_delta = np.zeros(max_num_seqs, np.int64)
        self.random = np.random.default_rng(seed)

    def draw_seed(self) -> int:
        """A seed for a request that names none."""
        return int(self.random.integers(INT64_LIMIT))

    def take(self, seq: Sequence) -> None:
        row = seq.row = self.free.pop()
        seq.resets_row = True
        params = seq.sampling_params
        self.num_blocks[row] = 0
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, INT64_LIMIT - 1)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seq.seed
        self.repetition_penalty[row] = params.repetition_penalty
        self.min_tokens[row] = min(params.min_tokens, INT64_LIMIT - 1)
        self.wants_logprobs[row] = params.logprobs is not None
        self.position_delta[row] = seq.position_delta
        self.sync_blocks(seq)

    def give(self, seq: Sequence) -> None:
        self.free.append(seq.row)
        seq.row = -1

    def sync_blocks(self, seq: Sequence) -> None:
        """Brings the row's block table up to the sequence's, which only ever grows while it runs."""
        known, now = int(self.num_blocks[seq.row]), len(seq.block_table)
        if known != now:
            self.block_tables[seq.row, known:now] = seq.block_table[known:]
            self.num_blocks[seq.row] = now

    def tables(self, rows: IntArray, width: int) -> NDArray[np.int32]:
        return self.block_tables[rows, :width]
