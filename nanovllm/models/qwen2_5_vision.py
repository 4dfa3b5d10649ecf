"""The vision tower of Qwen2.5-VL: patches of images and videos to the rows that the decoder reads."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nanovllm.attention.contract import AttentionBackend
from nanovllm.layers.activation import GatedMLP
from nanovllm.layers.linear import ColumnLinear, RowLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotation, apply_rotary, inverse_frequencies
from nanovllm.model_config import VisionConfig
from nanovllm.parallel import ALONE, TensorParallel

NORM_EPS = 1e-6             # of every norm in the tower; checkpoints do not say it
ROPE_THETA = 10000.0        # likewise
LAYOUTS_KEPT = 16           # the layout of a 4K picture is about 1 MB of host memory


@dataclass(frozen=True)
class GridLayout:
    """How the patches of one grid are ordered for window attention, and which of them see each other."""

    order: NDArray[np.int64]            # [rows] the merged row, counted in prompt order, at each place of window order
    coordinates: NDArray[np.int64]      # [2, patches] patch row and column, in window order
    window_lens: tuple[int, ...]        # patches of each window, none of them 0
    frame_lens: tuple[int, ...]         # patches of each frame


def grid_layout(grid: tuple[int, int, int], merge: int, window: int) -> GridLayout:
    """The layout of grid (t, h, w) in patches, with windows of `window` x `window` merged rows (fewer at the edges)."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    one_frame = np.arange(rows * columns).reshape(rows, columns)
    windows = [one_frame[top : top + window, left : left + window].ravel()
               for top in range(0, rows, window) for left in range(0, columns, window)]
    frame_order = np.concatenate(windows)
    order = (np.arange(frames)[:, None] * one_frame.size + frame_order).ravel()
    # The patches of one merged row are neighbours: [merged row, place in the merge x merge square].
    square = np.arange(merge)
    y = (frame_order // columns)[:, None, None] * merge + square[:, None] + 0 * square
    x = (frame_order % columns)[:, None, None] * merge + 0 * square[:, None] + square
    coordinates = np.tile(np.stack((y.ravel(), x.ravel())), frames)
    window_lens = tuple(part.size * merge**2 for part in windows) * frames
    return GridLayout(order, coordinates, window_lens, (one_frame.size * merge**2,) * frames)


@dataclass(frozen=True)
class Segments:
    """Stretches of tokens that attend among themselves; the lengths on the device (as a running sum) and the host."""

    cu_seqlens: Tensor          # int32 [segments + 1]
    seqlens: tuple[int, ...]

    @classmethod
    def of_lengths(cls, seqlens: tuple[int, ...], device: torch.device) -> Segments:
        """Segments of these lengths, one after the other from token 0 on."""
        cu_seqlens = np.cumsum((0, *seqlens), dtype=np.int32)
        return cls(torch.from_numpy(cu_seqlens).to(device, non_blocking=True), seqlens)


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel, hence one matrix product over flattened patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.weight = nn.Parameter(torch.empty(config.hidden_size, *kernel), requires_grad=False)

    def forward(self, patches: Tensor) -> Tensor:
        """`[patches, hidden]` of patches `[patches, patch_dim]`, any float dtype."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1))


class VisionAttention(nn.Module):
    """Self-attention inside segments, no mask, of this rank's heads."""

    def __init__(self, config: VisionConfig, backend: AttentionBackend, parallel: TensorParallel) -> None:
        super().__init__()
        size = config.hidden_size
        self.backend = backend
        self.num_heads = config.num_heads // parallel.size
        self.scale = (size // config.num_heads) ** -0.5
        qkv = tuple(parallel.split(size, first, 3 * size) for first in (0, size, 2 * size))
        self.qkv = ColumnLinear(size, qkv, bias=True)
        self.proj = RowLinear(size, size, bias=True, parallel=parallel)

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        if (fused := self.backend.fused) is not None:
            fused.rotate(qkv[:, :2].flatten(1, 2), *rotation)           # queries and keys, in place
        q, k, v = qkv.unbind(1)                                         # [patches, heads, head_dim]
        if fused is None:
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        out = self.backend.encode(q, k, v, segments.cu_seqlens, segments.seqlens, self.scale)
        return self.proj(out.flatten(1))


class VisionBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: VisionConfig, backend: AttentionBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS, backend.fused)
        self.attn = VisionAttention(config, backend, parallel)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS, backend.fused)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=True, fused=backend.fused,
                            parallel=parallel)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """(what this block adds, the stream it is to be added to), both `[patches, hidden]`."""
        x, residual = self.norm1.add_and_norm(x, residual)
        x, residual = self.norm2.add_and_norm(self.attn(x, rotation, segments), residual)
        return self.mlp(x), residual


class PatchMerger(nn.Module):
    """Each merge x merge square of patches to one row of the decoder's width."""

    def __init__(self, config: VisionConfig, backend: AttentionBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, NORM_EPS, backend.fused)
        self.mlp = nn.Sequential(
            ColumnLinear(self.merged_size, (parallel.split(self.merged_size),), bias=True), nn.GELU(),
            RowLinear(self.merged_size, config.out_hidden_size, bias=True, parallel=parallel))

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """`[patches / merge^2, out_hidden_size]` of x + residual `[patches, hidden]`, squares in a row."""
        return self.mlp(self.ln_q.add_and_norm(x, residual)[0].view(-1, self.merged_size))


class VisionTower(nn.Module):
    """Runs any number of images and videos at once; each frame, and in window layers each window, by itself."""

    inv_freq: Tensor

    def __init__(self, config: VisionConfig, backend: AttentionBackend, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.merge = config.spatial_merge_size
        self.full_layers = frozenset(config.fullatt_block_indexes)
        self.patch_embed = nn.Sequential(OrderedDict(proj=PatchProjection(config)))
        self.blocks = nn.ModuleList(VisionBlock(config, backend, parallel) for _ in range(config.depth))
        self.merger = PatchMerger(config, backend, parallel)
        # Half the pairs of a head turn by the patch's row, half by its column.
        axis_dim = config.hidden_size // config.num_heads // 2
        self.register_buffer("inv_freq", inverse_frequencies(ROPE_THETA, axis_dim), persistent=False)
        window = config.window_size // config.patch_size // config.spatial_merge_size
        self.layout = lru_cache(LAYOUTS_KEPT)(partial(grid_layout, merge=config.spatial_merge_size, window=window))

    @staticmethod
    def compute_dtype(dtype: torch.dtype) -> torch.dtype:
        """The tower's dtype in a model of `dtype`: bfloat16 for float16, whose range its activations can pass."""
        return torch.bfloat16 if dtype == torch.float16 else dtype

    def rotation(self, layouts: list[GridLayout], device: torch.device) -> Rotation:
        """cos and sin, float32 `[patches, head_dim / 2]`, in window order."""
        coordinates = torch.from_numpy(np.concatenate([layout.coordinates for layout in layouts], axis=1))
        angles = coordinates.to(device, non_blocking=True).float()[..., None] * self.inv_freq   # [2, patches, pairs]
        both = angles.transpose(0, 1).flatten(1)
        return both.cos(), both.sin()

    def window_order(self, layouts: list[GridLayout], device: torch.device) -> Tensor:
        """int64 `[rows]`: the merged row, counted over all grids, at each place of window order."""
        firsts = np.cumsum([0, *(layout.order.size for layout in layouts[:-1])])
        order = np.concatenate([layout.order + first for layout, first in zip(layouts, firsts)])
        return torch.from_numpy(order).to(device, non_blocking=True)

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Rows `[sum of t * h * w / merge^2, out_hidden_size]` in prompt order.

        patches: `[sum of t * h * w, patch_dim]`, grid after grid, in the order of Hugging Face processors.
        """
        device = patches.device
        layouts = [self.layout(tuple(grid)) for grid in grids]
        order, rotation = self.window_order(layouts, device), self.rotation(layouts, device)
        windows = Segments.of_lengths(sum((layout.window_lens for layout in layouts), ()), device)
        frames = Segments.of_lengths(sum((layout.frame_lens for layout in layouts), ()), device)
        x = self.patch_embed(patches)
        x = x.unflatten(0, (-1, self.merge**2)).index_select(0, order).flatten(0, 1)
        residual: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, rotation, frames if index in self.full_layers else windows)
        merged = self.merger(x, residual)
        return torch.empty_like(merged).index_copy_(0, order, merged)
