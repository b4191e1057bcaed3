"""How many ranks there are, and which part of the work each has. Arithmetic alone, no torch.

A rank is one process. Rank 0 schedules and samples, so it stands where logits come out: stages are numbered backwards
along the ranks. ``rank = (replica * stages + (stages - 1 - stage)) * tp + tp_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelbay.args import EngineArgs


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank does: its replica, its stage (0 takes tokens in), its share of each layer."""

    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """Replicas × stages × ranks that share a layer. ``expert_parallel``: experts are split over replicas × shares."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, args: EngineArgs) -> Mesh:
        sizes = (args.data_parallel_size, args.pipeline_parallel_size, args.tensor_parallel_size)
        return cls(*sizes, args.enable_expert_parallel)

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def rank(self, place: Place) -> int:
        return (place.dp_rank * self.pp + self.pp - 1 - place.pp_rank) * self.tp + place.tp_rank

    def place(self, rank: int) -> Place:
        rest, tp_rank = divmod(rank, self.tp)
        dp_rank, from_end = divmod(rest, self.pp)
        return Place(dp_rank, self.pp - 1 - from_end, tp_rank)

    def leader(self, dp_rank: int) -> int:
        """The rank at which a replica's logits come out."""
        return self.rank(Place(dp_rank, self.pp - 1, 0))

    def tp_groups(self) -> list[list[int]]:
        """The ranks that share each layer of a stage, for every stage of every replica."""
        return [
            [self.rank(Place(dp, pp, tp)) for tp in range(self.tp)] for dp in range(self.dp) for pp in range(self.pp)
        ]

    def ep_groups(self) -> list[list[int]]:
        """The ranks that share each layer's experts, for every stage; empty without expert parallelism."""
        if not self.expert_parallel:
            return []
        return [
            [self.rank(Place(dp, pp, tp)) for dp in range(self.dp) for tp in range(self.tp)] for pp in range(self.pp)
        ]

    def __str__(self) -> str:
        experts = ", experts over " + str(self.dp * self.tp) if self.expert_parallel else ""
        sizes = {"rank": self.size, "replica": self.dp, "stage": self.pp, "share": self.tp}
        ranks, *factors = (f"{size} {what}{'s' * (size != 1)}" for what, size in sizes.items())
        return f"{ranks} = {' × '.join(factors)}{experts}"
