"""Several ranks in one process: each a thread, their collectives made of a barrier and a shared list.

What a layer computes on its rank, and what it asks of the others, is tested in milliseconds; that processes can be
joined is tested elsewhere, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.groups import Alone, Group, Traffic
from modelbay_runtime.parallel.mesh import Mesh

Result = TypeVar("Result")
_TIMEOUT_S = 60.0


class _Shared:
    """Where the ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.slots: list[Any] = [None] * size


class ThreadGroup:
    """See `modelbay_runtime.parallel.groups.Group`."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size, self._shared = rank, len(shared.slots), shared
        self.traffic = Traffic()

    def _exchange(self, value: Any) -> list[Any]:
        self._shared.slots[self.rank] = value
        self._shared.barrier.wait()
        everything = list(self._shared.slots)
        self._shared.barrier.wait()
        return everything

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.traffic.count("all_reduce", x)
        first, *rest = self._exchange(x.clone())
        total = first.clone()
        for part in rest:
            total += part
        return total

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.traffic.count("all_gather", x)
        return torch.cat(self._exchange(x.clone()), dim)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        self.traffic.count("all_to_all", x)
        assert sum(send) == x.shape[0], "every row has a rank to go to"
        parts = self._exchange(list(x.clone().split(list(send))))
        mine = [sent[self.rank] for sent in parts]
        assert [len(part) for part in mine] == list(receive), "what comes in is what was announced"
        return torch.cat(mine)


def run_ranks(mesh: Mesh, fn: Callable[[ParallelContext], Result]) -> list[Result]:
    """``fn`` once for every rank of ``mesh``, at the same time; the results by rank.

    Raises:
        Exception: what the first rank that failed raised; the others are released.
    """
    groups: dict[int, dict[str, Group]] = {rank: {} for rank in range(mesh.size)}
    shared: list[_Shared] = []
    for name, members in [("tp", mesh.tp_groups()), ("ep", mesh.ep_groups())]:
        for ranks in members:
            if len(ranks) > 1:
                shared.append(_Shared(len(ranks)))
                for index, rank in enumerate(ranks):
                    groups[rank][name] = ThreadGroup(index, shared[-1])
    results: list[Any] = [None] * mesh.size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        own = groups[rank]
        context = ParallelContext(mesh, mesh.place(rank), own.get("tp", Alone()), own.get("ep", Alone()))
        try:
            with torch.inference_mode():
                results[rank] = fn(context)
        except BaseException as error:  # the others would wait for it
            errors.append((rank, error))
            for meeting in shared:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own_fault = [error for _, error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise own_fault[0] if own_fault else errors[0][1]
    return results
