"""This process's place among others, as the modules that are built in it see it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelbay_runtime.parallel.groups import Alone, Apart, Group
from modelbay_runtime.parallel.mesh import Mesh, Place
from modelbay_runtime.parallel.sizes import share_of


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A place in a mesh, and the groups that it belongs to.

    Attributes:
        tp: the ranks that share each layer. ep: the ranks that share the experts, where experts are parallel (of one
            rank else; its ranks are ordered by replica, then by share).
        local_ranks: ranks of this machine, which share its cores and memory.
    """

    mesh: Mesh = field(default_factory=Mesh)
    place: Place = field(default_factory=Place)
    tp: Group = field(default_factory=Alone)
    ep: Group = field(default_factory=Alone)
    local_ranks: int = 1

    @classmethod
    def apart(cls, mesh: Mesh, place: Place) -> ParallelContext:
        """For a module that is built to be measured: its collectives refuse to run."""
        ep: Group = Alone()
        if mesh.expert_parallel and mesh.dp * mesh.tp > 1:
            ep = Apart(place.dp_rank * mesh.tp + place.tp_rank, mesh.dp * mesh.tp)
        return cls(mesh, place, Apart(place.tp_rank, mesh.tp) if mesh.tp > 1 else Alone(), ep)

    @property
    def tp_rank(self) -> int:
        return self.tp.rank

    @property
    def tp_size(self) -> int:
        return self.tp.size

    @property
    def is_first_stage(self) -> bool:
        """Whether tokens come in here: the embedding is needed."""
        return self.place.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether hidden states come out here: the final norm and the head are needed."""
        return self.place.pp_rank == self.mesh.pp - 1

    def divide(self, size: int, what: str) -> int:
        """This rank's share of ``size``.

        Raises:
            UsageError: it does not divide; the numbers are in the message.
        """
        return share_of(size, self.tp_rank, self.tp_size, what).size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share a layer."""
        return self.tp.all_reduce(x)
