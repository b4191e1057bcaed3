"""Token embedding and the head over the vocabulary, both split by tokens over the ranks that share a layer.

The vocabulary is padded so that every rank holds as many rows (BEHAVIOUR X9); no padding is ever seen outside.
Legend: T tokens, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import Linear, parameter
from modelbay_runtime.layout import Shard
from modelbay_runtime.parallel.sizes import padded_share_of


def vocabulary_shard(build: BuildContext, vocab_size: int) -> Shard:
    """The rows of this rank; the same for an embedding and for the head that is tied to it."""
    share = padded_share_of(vocab_size, build.parallel.tp_rank, build.parallel.tp_size)
    return Shard(0, share.start, share.size, share.pad, total=vocab_size)


class Embedding(nn.Module):
    """[T] int64 -> [T, H]. Each rank looks up the tokens that it holds, and the sum over ranks is taken."""

    style = "embedding_rowwise"

    def __init__(self, build: BuildContext, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        shard = vocabulary_shard(build, num_embeddings)
        self.first, self.held = shard.start, shard.size
        self.shards: dict[str, Shard] = {}
        self.all_reduce = None
        if build.parallel.tp_size > 1:
            self.shards["weight"] = shard
            self.all_reduce = build.parallel.all_reduce
        self.weight = parameter((shard.size + shard.pad, embedding_dim), build.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.all_reduce is None:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.first
        elsewhere = (rows < 0) | (rows >= self.held)
        mine = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill_(elsewhere[:, None], 0)
        return self.all_reduce(mine)


class Head(Linear):
    """[R, H] -> [R, V], on every rank. ``tied_to`` names the embedding's weight when the two are one parameter."""

    hold_blocks = None  # type: ignore[assignment]  # checkpoints in 8 bits have it in 16

    def __init__(self, build: BuildContext, hidden_size: int, vocab_size: int, *, tied_to: str | None) -> None:
        shard = vocabulary_shard(build, vocab_size)
        super().__init__(build, hidden_size, shard.size + shard.pad)
        self.style = "colwise_gather_output"
        self.tied_to = tied_to
        self.vocab_size = vocab_size
        self.tp = build.parallel.tp
        if self.tp.size > 1:
            self.shards["weight"] = shard

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.partial(x, residual)
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits, -1)[:, : self.vocab_size].contiguous()
