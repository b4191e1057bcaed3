"""Token embedding and the head over the vocabulary.

Legend: T tokens, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import Linear, parameter


class Embedding(nn.Module):
    """[T] int64 -> [T, H]."""

    def __init__(self, build: BuildContext, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = parameter((num_embeddings, embedding_dim), build.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class Head(Linear):
    """[R, H] -> [R, V]. ``tied_to`` names the embedding's weight when the two are one parameter."""

    def __init__(self, build: BuildContext, hidden_size: int, vocab_size: int, *, tied_to: str | None) -> None:
        super().__init__(build, hidden_size, vocab_size)
        self.tied_to = tied_to
