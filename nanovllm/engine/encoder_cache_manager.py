"""The encoder cache: rows of images that the vision tower has computed, kept on the device by image key."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.encoder_cache_table import EncoderCacheTable
from nanovllm.image.hashing import content_hash
from nanovllm.runner.inputs import block_slots, host_tensor
from nanovllm.runner.kv_cache import allocate_zeros
from nanovllm.runner.staging import to_device


class EncoderCacheManager(EncoderCacheTable):
    """The table together with the pool of rows that it speaks of: `[num_blocks * block_size, hidden_size]`.

    Args:
        num_blocks: blocks in the pool.
        block_size: encoder rows of a block.
        hidden_size: values of a row.
        dtype: of the rows.
        device: where the pool lies.
    """

    def __init__(self, num_blocks: int, block_size: int, hidden_size: int, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__(num_blocks, block_size)
        self.rows = allocate_zeros((num_blocks * block_size, hidden_size), dtype, torch.device(device))

    @staticmethod
    def compute_hash(pixels: Any, grid: Any) -> int:
        """128-bit identity of `pixels` [patches, patch_dim], any dtype, under `grid` [3]: t, h, w in patches."""
        return content_hash(pixels, [int(size) for size in grid])

    def write(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Puts all rows [rows, hidden_size] of an image into the blocks allocated for it, which makes it a hit."""
        self.store(block_ids, rows)
        self.mark_written(self.owners[block_ids[0]])

    def store(self, block_ids: Sequence[int], rows: Tensor) -> None:
        """Puts rows into blocks, whatever the table says: for ranks that leave the table to another one."""
        slots = block_slots(block_ids, 0, len(rows), self.block_size)
        self.rows.index_copy_(0, to_device(host_tensor(slots), self.rows.device), rows.to(self.rows.dtype))

    def read(self, block_ids: Sequence[int], stop: int, first: int = 0) -> Tensor:
        """Rows [first, stop) of the image in these blocks, copied: [stop - first, hidden_size]."""
        slots = block_slots(block_ids, first, stop, self.block_size)
        return self.rows.index_select(0, to_device(host_tensor(slots), self.rows.device))

    def release_rows(self) -> None:
        """Gives the pool's memory back; nothing can be written or read any more."""
        self.rows = self.rows.new_empty(0)
