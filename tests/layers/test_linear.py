"""Merged projections and the gated block against their parts."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from nanovllm.layers.activation import GatedMLP
from nanovllm.layers.embedding import VocabEmbedding
from nanovllm.layers.linear import MergedLinear
from nanovllm.parallel import ALONE, TensorParallel


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


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_logits_go_where_they_are_wanted(num_ranks):
    """A vocabulary that three ranks do not divide; those of rank 0 alone are seen."""
    class Ranks:
        def gather(self, outputs, inputs, options):
            for out, rank in zip(outputs[0], ranks):
                torch.mm(hidden, rank.weight.T, out=out)

    group = Ranks() if num_ranks > 1 else None
    ranks = [VocabEmbedding(11, 4, TensorParallel(rank, num_ranks, group)) for rank in range(num_ranks)]
    for rank in ranks:
        fill(rank)
    hidden, first = torch.randn(2, 4), ranks[0]
    buffer = torch.full((5, first.padded_vocab_size), float("nan"))
    logits = first.logits(hidden, buffer[:2])
    assert logits.data_ptr() == buffer.data_ptr() and logits.shape == (2, 11) and buffer[2:].isnan().all()
    torch.testing.assert_close(logits, first.logits(hidden))
    torch.testing.assert_close(logits, (hidden @ torch.cat([rank.weight for rank in ranks]).T)[:, :11])
