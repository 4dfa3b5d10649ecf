"""Token ids to vectors and vectors to logits, over the rows of one vocabulary."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VocabEmbedding(nn.Module):
    """One row a token id, rows of a padded vocabulary included; weight `[vocab_size, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows `[tokens, hidden_size]` of token_ids `[tokens]`, each in `[0, vocab_size)`."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab_size]` of hidden `[rows, hidden_size]`, in the dtype of the weights."""
        return F.linear(hidden, self.weight)
