"""The decoder that all supported language models share; what differs between them is in their TextConfig."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from nanovllm.attention.contract import AttentionBackend, SpanBatch
from nanovllm.layers.activation import GatedMLP
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import RotaryEmbedding, Rotation
from nanovllm.model_config import ModelConfig, TextConfig
from nanovllm.models.layer_stage import FinalRows, LayerStage
from nanovllm.parallel import ALONE, TensorParallel


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: TextConfig, backend: AttentionBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend.fused)
        self.self_attn = PagedAttention(config, backend, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend.fused)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, fused=backend.fused, parallel=parallel)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, kv_cache: Tensor, spans: SpanBatch,
        final: FinalRows | None
    ) -> tuple[Tensor, Tensor]:
        """(what this layer adds, the stream it is to be added to), both `[tokens, hidden]`; tokens: all, or `final`."""
        kept = None if final is None else (final.rows, final.spans)
        hidden, residual = self.self_attn.forward_normed(self.input_layernorm, hidden, residual, rotation, kv_cache,
                                                         spans, kept)
        return self.mlp.forward_normed(self.post_attention_layernorm, hidden, residual)


class Decoder(nn.Module):
    """Embeddings to final hidden states, through all layers and the last norm."""

    def __init__(self, config: TextConfig, backend: AttentionBackend, parallel: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(DecoderLayer(config, backend, parallel) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend.fused)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, backend.fused)

    def forward(self, hidden: Tensor, positions: Tensor, kv_cache: Tensor, stages: Sequence[LayerStage],
                final: FinalRows | None) -> Tensor:
        """See `CausalLM.forward`."""
        assert stages and stages[0].first_layer == 0, "the first stage starts at layer 0"
        starting = {stage.first_layer: stage for stage in stages}
        assert len(starting) == len(stages), "one stage a layer"
        cos, sin = self.rotary_emb(positions)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if (stage := starting.get(index)) is not None:
                spans = stage.spans
                if (rows := stage.rows) is not None:
                    hidden, cos, sin = (rowwise.index_select(0, rows) for rowwise in (hidden, cos, sin))
                    residual = None if residual is None else residual.index_select(0, rows)
                if not spans.q_lens:        # every row left to reused KV: none goes further
                    break
            is_last = index == len(self.layers) - 1
            hidden, residual = layer(hidden, residual, (cos, sin), kv_cache[index], spans, final if is_last else None)
        return self.norm.add_and_norm(hidden, residual)[0]


class CausalLM(nn.Module):
    """A language model as the runner drives it: embed, run the layers, compute logits."""

    # (prefix in a checkpoint, prefix here); the first that fits renames a tensor
    checkpoint_prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init__(self, config: ModelConfig, backend: AttentionBackend, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        text = config.text
        self.model = Decoder(text, backend, parallel)
        self.lm_head = (None if text.tie_word_embeddings
                        else VocabEmbedding(text.vocab_size, text.hidden_size, parallel))

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[tokens, hidden]` of token_ids int64 `[tokens]`."""
        return self.model.embed_tokens(token_ids)

    def forward(self, hidden: Tensor, positions: Tensor, kv_cache: Tensor, stages: Sequence[LayerStage],
                final: FinalRows | None = None) -> Tensor:
        """Final hidden states `[rows, hidden]`, of the last stage or of `final`, from embeddings `[tokens, hidden]`.

        positions: int64 `[axes, tokens]`, 1 axis for text models and 3 (t, h, w) for M-RoPE; stages in the order of
        their first layers, the first of them 0; kv_cache `[layers, 2, blocks, block_size, kv_heads, head_dim]` gets
        the keys and values of every computed row.
        """
        return self.model(hidden, positions, kv_cache, stages, final)

    @property
    def head(self) -> VocabEmbedding:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[rows, vocab_size]`, in the dtype of the weights, of final hidden states `[rows, hidden]`; on rank 0, and in
        `out`, see `VocabEmbedding`."""
        return self.head.logits(hidden, out)
