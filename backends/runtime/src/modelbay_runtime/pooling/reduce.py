"""Many tokens' vectors to one of each sequence, on the device, as they are computed.

A sequence may come in several steps: what is kept between them is one row, not its hidden states.
Legend: T tokens of the step, n sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from modelbay_runtime.pooling.plan import PoolingPlan


@dataclass(slots=True)
class Chunk:
    """Some tokens of one sequence in a step.

    Args:
        key: the request. begin: its first row in the step's hidden states; count: how many rows.
        first: position of the first of these tokens. total: tokens of the sequence; ``token_ids``: all of them, where
            they matter.
    """

    key: str
    begin: int
    count: int
    first: int
    total: int
    plan: PoolingPlan
    token_ids: Sequence[int] = ()

    @property
    def complete(self) -> bool:
        return self.first + self.count == self.total

    @property
    def skip(self) -> int:
        """Tokens that are not pooled; never all of them."""
        return self.plan.skip if self.plan.skip < self.total else 0


@dataclass(slots=True)
class Partial:
    """What is kept of a sequence that is not complete: mode -> row [H], float32; or its hidden states."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    hidden: list[torch.Tensor] = field(default_factory=list)


def reduce_step(hidden: torch.Tensor, chunks: Sequence[Chunk], mode: str) -> list[torch.Tensor | None]:
    """hidden [T, H] -> each chunk's part [H] in float32, None where it has none: the token itself ("cls", "last"), the
    largest ("max"), the sum ("mean", "mean_sqrt_len"), the sum weighted by position ("weighted_mean")."""
    if mode in ("cls", "last"):
        return _picked(hidden, chunks, mode)
    pooled = [(chunk, max(0, chunk.skip - chunk.first)) for chunk in chunks]
    lengths = [max(0, chunk.count - cut) for chunk, cut in pooled]
    rows = [range(chunk.begin + cut, chunk.begin + cut + n) for (chunk, cut), n in zip(pooled, lengths, strict=True)]
    values = _rows(hidden, rows).float()
    if mode == "weighted_mean":
        places = [torch.arange(c.first + cut + 1, c.first + c.count + 1, dtype=torch.float32) for c, cut in pooled]
        values = values * torch.cat(places).to(hidden.device)[:, None]
    reduce = "max" if mode == "max" else "sum"
    size = torch.tensor(lengths, device=hidden.device)
    sums = torch.segment_reduce(values, reduce, lengths=size, axis=0)
    return [row if n else None for row, n in zip(sums, lengths, strict=True)]


def merge(mode: str, kept: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """What two parts of one sequence make together."""
    if kept is None or new is None:
        return new if kept is None else kept
    return torch.maximum(kept, new) if mode == "max" else kept + new


def divisor(mode: str, chunk: Chunk) -> float:
    """What a sum is divided by, once the sequence is complete."""
    length = chunk.total - chunk.skip
    if mode == "mean":
        return float(length)
    if mode == "mean_sqrt_len":
        return float(length) ** 0.5
    if mode == "weighted_mean":
        return (chunk.total * (chunk.total + 1) - chunk.skip * (chunk.skip + 1)) / 2
    return 1.0


def _picked(hidden: torch.Tensor, chunks: Sequence[Chunk], mode: str) -> list[torch.Tensor | None]:
    rows: list[int | None] = []
    for chunk in chunks:
        place = chunk.skip if mode == "cls" else chunk.total - 1
        inside = chunk.first <= place < chunk.first + chunk.count
        rows.append(chunk.begin + place - chunk.first if inside else None)
    found = [row for row in rows if row is not None]
    picked = iter(hidden[torch.tensor(found, device=hidden.device)].float() if found else ())
    return [None if row is None else next(picked) for row in rows]


def _rows(hidden: torch.Tensor, ranges: Sequence[range]) -> torch.Tensor:
    """The rows of these ranges, one after another; no copy where they follow one another."""
    follow = all(a.stop == b.start for a, b in pairwise(ranges))
    if follow and ranges:
        return hidden[ranges[0].start : ranges[-1].stop]
    return torch.cat([hidden[rows.start : rows.stop] for rows in ranges])
