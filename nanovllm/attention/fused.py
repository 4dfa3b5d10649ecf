"""The Triton kernels that layers use beside attention, one object that a backend hands on."""
from __future__ import annotations

from nanovllm.attention.contract import FusedOps
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.compile_ahead import compile_ahead
from nanovllm.kernels.embedding import embed
from nanovllm.kernels.few_rows import beats_library, gated_linear, linear, norm_linear
from nanovllm.kernels.kv_move import move_kv
from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.kernels.rotary import norm_rotate_store, rotate, rotation
from nanovllm.kernels.sampling import draw, largest, lowest_kept, sample
from nanovllm.kernels.sum_ranks import sum_ranks


class TritonOps(FusedOps):
    """See each kernel's own file."""

    compile_ahead = staticmethod(compile_ahead)
    embed = staticmethod(embed)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    beats_library = staticmethod(beats_library)
    linear = staticmethod(linear)
    norm_linear = staticmethod(norm_linear)
    gated_linear = staticmethod(gated_linear)
    silu_and_mul = staticmethod(silu_and_mul)
    rotation = staticmethod(rotation)
    rotate = staticmethod(rotate)
    norm_rotate_store = staticmethod(norm_rotate_store)
    largest = staticmethod(largest)
    lowest_kept = staticmethod(lowest_kept)
    draw = staticmethod(draw)
    sample = staticmethod(sample)
    sum_ranks = staticmethod(sum_ranks)
    move_kv = staticmethod(move_kv)
