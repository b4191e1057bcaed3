"""Ranks that work together, and what they do together: c10d's collectives, counted.

A group is handed to layers, which neither know nor care how its ranks are joined. Legend: n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class Traffic:
    """What this rank gave to a group so far: ``calls`` and ``bytes`` (of the tensors handed in) by collective."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, x: torch.Tensor) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + x.numel() * x.element_size()


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """What one rank gave to others so far: to the ranks it shares layers with, to those it shares experts with, and,
    as bytes of hidden states, to the stage after it."""

    tp: Traffic
    ep: Traffic
    stage_bytes: int


class Group(Protocol):
    """Ranks that hold parts of the same thing."""

    rank: int
    size: int
    traffic: Traffic

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, which may be ``x`` itself, overwritten."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's ``x`` (of one shape), joined along ``dim`` in order of ranks."""
        ...

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Rows of ``x`` [n, …] to their ranks, the first ``send[0]`` to rank 0 …; the rows that came, by rank."""
        ...


class Alone:
    """A group of one: nothing is exchanged."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return x


class Apart:
    """One rank of a group whose others do not exist: for modules that are built to be measured and never run."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.traffic = Traffic()

    def _refuse(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a module that was built to be measured was run")

    all_reduce = all_gather = all_to_all = _refuse


class Joined:
    """A group of processes: one of c10d's process groups, over gloo or NCCL."""

    def __init__(self, ranks: Sequence[int], rank: int, group: Any) -> None:
        """``ranks``: the members' numbers in the world, in order; ``rank``: this process's own."""
        self.ranks = tuple(ranks)
        self.rank, self.size = self.ranks.index(rank), len(self.ranks)
        self.group = group
        self.traffic = Traffic()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.traffic.count("all_reduce", x)
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.traffic.count("all_gather", x)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        self.traffic.count("all_to_all", x)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self.group.alltoall_base(out, x.contiguous(), list(receive), list(send)).wait()
        return out
