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

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab_size]` of hidden `[rows, hidden_size]`, in the dtype of the weights.

        Rank 0 alone gets them; the others get logits of their own share of the vocabulary, which nobody needs.
        """
        return self.parallel.gather(F.linear(hidden, self.weight))[:, :self.vocab_size]
