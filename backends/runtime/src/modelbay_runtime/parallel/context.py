"""Which ranks this process is, and the collectives a layer asks for. Written for any size; one process for now."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelbay.errors import UsageError


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This process's place: ``tp_rank`` of ``tp_size`` shares each layer."""

    tp_rank: int = 0
    tp_size: int = 1

    def divide(self, size: int, what: str) -> int:
        """This rank's share of ``size``.

        Raises:
            UsageError: it does not divide; the numbers are in the message.
        """
        if size % self.tp_size:
            raise UsageError(f"{what} = {size} does not divide over tensor_parallel_size = {self.tp_size}.")
        return size // self.tp_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share a layer."""
        assert self.tp_size == 1, "collectives over several processes are not built yet"
        return x
