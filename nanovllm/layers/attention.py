"""Self-attention of a decoder layer, over the paged KV cache of that layer."""
from __future__ import annotations

from torch import Tensor, nn

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.layers.linear import MergedLinear, RowLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import Rotation, apply_rotary
from nanovllm.model_config import TextConfig
from nanovllm.parallel import ALONE, TensorParallel


class PagedAttention(nn.Module):
    """Projects, rotates, stores the new keys and values and attends over what the spans may see."""

    def __init__(self, config: TextConfig, backend: AttentionBackend, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        q_size, kv = config.num_heads * config.head_dim, parallel.split_kv(config.num_kv_heads, config.head_dim)
        parts = {"q_proj": parallel.split(q_size), "k_proj": kv, "v_proj": kv}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, config.qkv_bias, backend.fused)
        self.o_proj = RowLinear(q_size, config.hidden_size, config.o_bias, backend.fused, parallel)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward_normed(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, rotation: Rotation, kv_cache: Tensor,
                       spans: SpanBatch, kept: tuple[Tensor, SpanBatch] | None = None) -> tuple[Tensor, Tensor]:
        """(attention of the norm of x + residual, x + residual), all `[tokens, hidden]`.

        kv_cache `[2, blocks, block_size, kv_heads, head_dim]` is written; kv_heads are those of this rank. kept: the
        rows (int64) that go on from here, and their spans; the others do no more than store their KV.
        """
        k_cache, v_cache = kv_cache.unbind(0)
        projections, residual = self.qkv_proj.forward_normed(norm, x, residual)
        q = self._queries(projections, rotation, k_cache, v_cache, spans.slot_mapping)
        if kept is not None:
            rows, spans = kept
            q, residual = q.index_select(0, rows), residual.index_select(0, rows)
        out = self.backend.attend(q, k_cache, v_cache, spans, self.scale)
        return self.o_proj(out.flatten(1)), residual

    def _queries(self, projections: Tensor, rotation: Rotation, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
                 ) -> Tensor:
        """Queries `[tokens, heads, head_dim]`; keys and values go to the caches."""
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        if (fused := self.backend.fused) is not None:
            qkv = projections.unflatten(-1, (-1, self.head_dim))
            weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
            return fused.norm_rotate_store(qkv, *rotation, weights, k_cache, v_cache, slots)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj.split(projections))
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        self.backend.store_kv(apply_rotary(k, rotation), v, k_cache, v_cache, slots)
        return apply_rotary(q, rotation)
