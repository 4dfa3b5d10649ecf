"""Token ids to vectors and vectors to logits, over the rows of one vocabulary that the ranks share out."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.parallel import ALONE, TensorParallel


class VocabEmbedding(nn.Module):
    """One row a token id, rows of a padded vocabulary included; weight `[vocab_size / ranks, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = parallel
        self.part = parallel.split(vocab_size)
        self.weight = nn.Parameter(torch.empty(self.part.size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows `[tokens, hidden_size]` of token_ids `[tokens]`, each in `[0, vocab_size)`."""
        if self.parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        places = token_ids - self.part.start
        elsewhere = (token_ids < self.part.start) | (token_ids >= self.part.stop)
        rows = F.embedding(places.masked_fill(elsewhere, 0), self.weight)
        return self.parallel.sum(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the weights on all ranks together."""
        return self.part.size * self.parallel.size

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[rows, vocab_size]` of hidden `[rows, hidden_size]`, in the dtype of the weights.

        Rank 0 alone gets them, in `out` `[rows, padded_vocab_size]` if that is given; the others get logits of their
        own share of the vocabulary, which nobody needs.
        """
        if out is None or self.parallel.size > 1:
            product = F.linear(hidden, self.weight)
        else:
            product = torch.mm(hidden, self.weight.T, out=out)
        return self.parallel.gather(product, out)[:, :self.vocab_size]
