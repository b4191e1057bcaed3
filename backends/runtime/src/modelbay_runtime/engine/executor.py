"""Who computes batches: this process alone, or this process and others.

A *lane* is a replica of the model: its requests, its cache. A round is one batch for every lane (None for a lane that
has nothing to do). Rounds are computed in the order in which they were submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from modelbay.resolve import Resolution
from modelbay_runtime.engine.batch import Batch
from modelbay_runtime.engine.rank import Rank
from modelbay_runtime.engine.runner import BatchOutput, Runner
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.groups import RankTraffic
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.sizes import check_mesh

#: A round, by lane.
Batches = Sequence[Batch | None]


class Executor(Protocol):
    """Attributes:
    lanes: replicas. depth: rounds that may be under way at a time without one waiting for another.
    rank: this process's part. runner: what computes it.
    """

    lanes: int
    depth: int
    rank: Rank
    runner: Runner

    def submit(self, batches: Batches) -> None:
        """Begin a round. At most ``depth`` may be under way."""
        ...

    def collect(self) -> list[BatchOutput | None]:
        """The outputs of the oldest round, by lane.

        Raises:
            EngineError: another process failed, with its traceback; nothing can be computed any more.
        """
        ...

    def drop(self) -> None:
        """Forget every round that is under way."""
        ...

    def clear_cache(self) -> None:
        """Zeros in every rank's cache."""
        ...

    def apply(self, fn: Callable[[Any], Any]) -> list[Any]:
        """``fn`` on every rank's module; the results by rank."""
        ...

    def traffic(self) -> list[RankTraffic]:
        """What every rank gave to others so far, by rank; empty where there are no others."""
        ...

    def failed(self) -> str | None:
        """Why nothing can be computed any more, or None; whoever has nothing to compute can ask now and then."""
        ...

    def close(self) -> None:
        """End the other processes. Idempotent."""
        ...


class InlineExecutor:
    """Everything in this process. See `Executor`."""

    lanes = depth = 1

    def __init__(self, resolution: Resolution) -> None:
        self.rank = Rank(resolution, ParallelContext(), gather=lambda value: [value])
        self.runner = self.rank.runner()
        self._rounds: deque[Batch] = deque()

    def submit(self, batches: Batches) -> None:
        [batch] = batches
        assert batch is not None, "the one lane has something to do, or there is no round"
        self._rounds.append(batch)

    def collect(self) -> list[BatchOutput | None]:
        return [self.runner.run(self._rounds.popleft())]

    def drop(self) -> None:
        self._rounds.clear()

    def clear_cache(self) -> None:
        self.rank.cache.clear()

    def apply(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [fn(self.rank.model)]

    def traffic(self) -> list[RankTraffic]:
        return []

    def failed(self) -> str | None:
        """What fails here fails where it is computed."""
        return None

    def close(self) -> None:
        """Nothing to end."""


def open_executor(resolution: Resolution) -> Executor:
    """The executor for the sizes that the arguments ask for; the model is loaded when it returns.

    Raises:
        UsageError: the model does not divide by them; no process was started.
    """
    mesh = Mesh.of(resolution.args)
    if mesh.size == 1:
        return InlineExecutor(resolution)
    check_mesh(resolution.config, mesh)
    from modelbay_runtime.parallel.executor import DistributedExecutor

    return DistributedExecutor(resolution, mesh)
