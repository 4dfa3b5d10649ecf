"""Merged projections and the gated block against their parts."""
from __future__ import annotations

import torch
from torch import nn

from nanovllm.layers.activation import GatedMLP
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.linear import MergedLinear
from nanovllm.parallel import ALONE


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def test_merged_rows_are_the_parts_in_order():
    layer = MergedLinear(6, {"q_proj": ALONE.split(8), "k_proj": ALONE.split(4), "v_proj": ALONE.split(4)}, bias=True)
    fill(layer)
    x = torch.randn(3, 6)
    q, k, v = layer.split(layer(x))
    for out, rows in ((q, slice(0, 8)), (k, slice(8, 12)), (v, slice(12, 16))):
        torch.testing.assert_close(out, x @ layer.weight[rows].T + layer.bias[rows])


def test_gate_is_activated_and_up_is_not():
    mlp = GatedMLP(6, 10, bias=True)
    fill(mlp)
    x = torch.randn(3, 6)
    gate, up = (x @ mlp.gate_up_proj.weight.T + mlp.gate_up_proj.bias).chunk(2, -1)
    expected = (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected)


def test_logits_cover_every_row_of_the_vocabulary():
    embedding = VocabEmbedding(11, 4)
    fill(embedding)
    embedding.bfloat16()
    logits = embedding.logits(embedding(torch.tensor([3, 10])))
    assert logits.dtype == torch.bfloat16 and logits.shape == (2, 11)
    torch.testing.assert_close(logits, embedding.weight[[3, 10]] @ embedding.weight.T)
