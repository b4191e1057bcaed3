"""What every rank does, in the order in which all do it: meet, check that they are the same program, load, agree."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modelbay.errors import EngineError
from modelbay.resolve import Resolution
from modelbay_runtime.build import pick_device
from modelbay_runtime.engine.rank import Rank
from modelbay_runtime.engine.runner import Runner
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.world import Meeting, World, pick_backend

#: How often a rank that loads says that it is still there, as a share of the time after which it is given up.
_BEATS = 8
_POLL_S = 0.02


class Member:
    """One rank of a mesh, from the first word to the others until it can compute.

    Args:
        failed: says why waiting for the others is in vain, or None.
    """

    def __init__(
        self, resolution: Resolution, mesh: Mesh, rank: int, store: Any, host: str,
        failed: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        args = resolution.args
        self.resolution, self.mesh, self.number = resolution, mesh, rank
        self._store, self._failed = store, failed
        self._timeout = args.distributed_timeout_seconds
        self._steps = itertools.count()
        self._done = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        with self._silent_after_errors():
            self.meet("started")
            backend = pick_backend(args.distributed_backend, pick_device(args.device))
            self.world = World(mesh, rank, Meeting(store, host, self._timeout, backend))
            self._check_alike()

    def load(self) -> tuple[Rank, Runner]:
        """Build and load this rank's part. All ranks call it."""
        with self._silent_after_errors():
            rank = Rank(self.resolution, self.world.context, self.gather)
            context = rank.built.context
            hidden_size = self.resolution.config.hidden_size
            runner = rank.runner(self.world.neighbours(hidden_size, context.dtype, context.device))
            self.meet("loaded")
        self._done.set()
        return rank, runner

    @contextmanager
    def _silent_after_errors(self) -> Iterator[None]:
        """A rank that failed is not there any more, and keeps neither its thread nor its store."""
        try:
            yield
        except BaseException:
            self._done.set()
            raise

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; however long the slowest takes to get here, as long as it lives."""
        self.meet(f"step{next(self._steps)}")
        return self.world.gather(value)

    def meet(self, where: str) -> None:
        """Wait until every rank is here.

        Raises:
            EngineError: one of them ended, or has been silent for too long.
        """
        self._store.set(f"{where}/{self.number}", b"here")
        missing = [rank for rank in range(self.mesh.size) if rank != self.number]
        heard: dict[int, tuple[bytes, float]] = {}
        looked = time.monotonic()
        while missing := [rank for rank in missing if not self._store.check([f"{where}/{rank}"])]:
            if words := self._failed():
                raise EngineError(words)
            if time.monotonic() - looked > self._timeout / _BEATS:
                looked = time.monotonic()
                self._check_beats(missing, heard, where)
            time.sleep(_POLL_S)

    def _check_beats(self, missing: list[int], heard: dict[int, tuple[bytes, float]], where: str) -> None:
        now = time.monotonic()
        for rank in missing:
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            last, since = heard.setdefault(rank, (beat, now))
            if beat != last:
                heard[rank] = (beat, now)
            elif now - since > self._timeout:
                raise EngineError(
                    f"rank {rank} was not heard of for {self._timeout:g} s while the others waited for it ({where}).",
                    hint="Look at its machine and the network; distributed_timeout_seconds is how long to wait.",
                )

    def _beat(self) -> None:
        for count in itertools.count():
            try:
                self._store.set(f"beat/{self.number}", str(count))
            except Exception:
                return  # the store is gone: whoever waits for it will notice
            if self._done.wait(self._timeout / _BEATS):
                return

    def _check_alike(self) -> None:
        """Raises:
        EngineError: this rank has other plugins than the first one, or another commit of the model.
        """
        resolution = self.resolution
        own = {**resolution.plugins.manifest(), "torch": torch.__version__, "commit": str(resolution.files.commit)}
        first = self.gather(own)[0]
        differing = [
            f"{name} {own.get(name, 'absent')} (rank 0: {first.get(name, 'absent')})"
            for name in sorted({*own, *first})
            if own.get(name) != first.get(name)
        ]
        if differing:
            raise EngineError(
                f"rank {self.number} is not the program that rank 0 is: {', '.join(differing)}.",
                hint="Install the same distributions everywhere, and name the model's revision by its commit.",
            )


class ThreadShare:
    """The ranks of one machine share its cores: torch's threads are this rank's part of them until `give_back`."""

    def __init__(self, local_ranks: int) -> None:
        self._before = torch.get_num_threads()
        self._own = max(1, self._before // local_ranks)
        torch.set_num_threads(self._own)

    def give_back(self) -> None:
        """Idempotent."""
        if torch.get_num_threads() == self._own:  # or else somebody has other plans by now
            torch.set_num_threads(self._before)


def place_device(resolution: Resolution, local_rank: int) -> Resolution:
    """The resolution with a device of this rank's own.

    Raises:
        EngineError: a machine with fewer GPUs than ranks.
    """
    device = pick_device(resolution.args.device)
    if device.type != "cuda":
        return resolution
    if local_rank >= torch.cuda.device_count():
        raise EngineError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}."
        )
    return dataclasses.replace(resolution, args=resolution.args.replace(device=f"cuda:{local_rank}"))
