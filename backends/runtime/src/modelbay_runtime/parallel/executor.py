"""The executor of a mesh: this process is rank 0, schedules, and computes its own part between telling the others."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from modelbay.cli.interrupt import interrupts_wait
from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.engine.executor import Round
from modelbay_runtime.engine.rank import Rank
from modelbay_runtime.engine.runner import BatchOutput, Runner
from modelbay_runtime.parallel.channel import Teller
from modelbay_runtime.parallel.groups import RankTraffic
from modelbay_runtime.parallel.launch import LOCALHOST, Processes, Started, Torchrun, listening_store
from modelbay_runtime.parallel.member import Member, place_device, share_threads
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.worker import applied, run_lane, serve

#: Seconds that a rank which broke a connection may take to leave word of why.
_LAST_WORDS_S = 5.0


class DistributedExecutor:
    """See `modelbay_runtime.engine.executor.Executor`.

    Under torchrun every process of the mesh runs the user's program and comes here; all but rank 0 compute until rank 0
    closes its model, and end then.
    """

    rank: Rank
    runner: Runner

    def __init__(self, resolution: Resolution, mesh: Mesh) -> None:
        self.lanes, self.depth = mesh.dp, mesh.pp
        self._mesh, self._rounds = mesh, deque[Round]()
        self._broken: str | None = None
        self._teller: Teller | None = None
        self._started: Started | None = None
        launcher, torchrun = resolution.args.distributed_executor_backend, Torchrun.found()
        if launcher == "torchrun" and torchrun is None:
            raise UsageError("distributed_executor_backend torchrun: this process was not started by it.")
        joins = torchrun if launcher in ("auto", "torchrun") else None
        self._threads = share_threads(_local_ranks(launcher, joins, mesh))
        try:
            if joins is not None:
                self._join(joins, resolution)
            elif launcher == "ray":
                self._start_on_ray(resolution)
            else:
                self._start(resolution)
        except BaseException:
            self._end(at_once=True)
            raise

    def _start(self, resolution: Resolution) -> None:
        """Start the other ranks on this machine."""
        store = listening_store(self._mesh.size, resolution.args.distributed_timeout_seconds)
        self._started = processes = Processes(resolution, self._mesh, store.port)
        weakref.finalize(self, Processes.end, processes, at_once=True)
        self._set_up(resolution, store, LOCALHOST, local_rank=0)

    def _start_on_ray(self, resolution: Resolution) -> None:
        """Let Ray start the other ranks, on whatever machines of its cluster have room."""
        from modelbay_runtime.parallel.ray_launch import RayActors, require_ray

        ray = require_ray()
        host = ray.util.get_node_ip_address()
        store = listening_store(self._mesh.size, resolution.args.distributed_timeout_seconds, host)
        self._started = RayActors(ray, resolution, self._mesh, host, store.port)
        self._set_up(resolution, store, host, local_rank=0)

    def _join(self, torchrun: Torchrun, resolution: Resolution) -> None:
        """Meet the ranks that torchrun started."""
        torchrun.check(self._mesh)
        store, host = torchrun.store(resolution.args.distributed_timeout_seconds), torchrun.host()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torchrun.rank == 0:
            self._set_up(resolution, store, host, local_rank)
            return
        serve(place_device(resolution, local_rank), self._mesh, torchrun.rank, store, host)
        raise SystemExit(0)

    def _set_up(self, resolution: Resolution, store: Any, host: str, local_rank: int) -> None:
        resolution = place_device(resolution, local_rank)
        failed = self._started.failed if self._started is not None else lambda: None
        with self._explained():
            self._member = Member(resolution, self._mesh, 0, store, host, failed)
            self._teller = Teller(self._member.world.control, resolution.args.distributed_timeout_seconds)
            self.rank, self.runner = self._member.load()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def submit(self, batches: Round) -> None:
        with self._explained():
            self._tell(("round", list(batches)))
            self._rounds.append(batches)

    def collect(self) -> list[BatchOutput | None]:
        batches = self._rounds.popleft()
        # Ctrl-C comes between two rounds: in the middle of one it would leave the ranks apart.
        with interrupts_wait(), self._explained():
            outputs = [run_lane(self.runner, self._mesh, batches[0])]
            for lane, batch in enumerate(batches[1:], start=1):
                leader = self._mesh.leader(lane)
                outputs.append(None if batch is None else self._member.world.receive_object(leader))
        return [None if output is None else self._here(output) for output in outputs]

    def _here(self, output: BatchOutput) -> BatchOutput:
        device = self.runner.device
        if output.logits is not None:
            output.logits = output.logits.to(device)
        return output

    def drop(self) -> None:
        while self._rounds and self._broken is None:
            self.collect()
        self._rounds.clear()

    def clear_cache(self) -> None:
        if self._broken is None:
            with self._explained():
                self._tell(("clear",))
                self.rank.cache.clear()

    def apply(self, fn: Callable[[Any], Any]) -> list[Any]:
        """See `Executor`.

        Raises:
            EngineError: ``fn`` cannot be sent to another process, or raised in one.
        """
        try:
            import cloudpickle

            payload = cloudpickle.dumps(fn)
        except Exception as error:
            raise EngineError(f"{fn!r} cannot be sent to the other ranks: {type(error).__name__}: {error}") from error
        with self._explained():
            self._tell(("apply", payload))
            found = self._member.world.gather(applied(payload, self.rank))
        for number, (fine, result) in enumerate(found):
            if not fine:
                raise EngineError(f"the function given to apply_model failed on rank {number}: {result}")
        return [result for _, result in found]

    def traffic(self) -> list[RankTraffic]:
        with self._explained():
            self._tell(("traffic",))
            return self._member.world.gather(self._member.world.traffic())

    def _tell(self, command: Any) -> None:
        if self._broken is not None:
            raise EngineError(f"this model cannot be used any more: {self._broken}", hint="Load it again.")
        assert self._teller is not None, "set up before anything is told"
        self._teller.tell(command)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever is raised between ranks leaves them apart for good; where a rank ended, its words are the reason."""
        try:
            yield
        except BaseException as error:
            if self._broken is not None:
                raise
            words = self._words(error)
            self._broken = words or f"{type(error).__name__}: {error}"
            self._end(at_once=True)
            if isinstance(error, RuntimeError) and not isinstance(error, ModelbayError):  # c10d's, about a connection
                raise EngineError(self._broken) from error
            raise

    def _words(self, error: BaseException) -> str | None:
        if self._started is None or isinstance(error, KeyboardInterrupt):
            return None
        # A model that failed here failed by itself; a connection that broke was broken by somebody.
        return self._started.wait_failed(0.0 if isinstance(error, ModelbayError) else _LAST_WORDS_S)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._broken is None:
            with contextlib.suppress(RuntimeError):  # somebody may be gone already
                self._tell(("close",))
            self._broken = "it was closed"
            self._end(at_once=False)

    def _end(self, *, at_once: bool) -> None:
        if self._teller is not None:
            self._teller.close()
        if self._started is not None:
            self._started.end(at_once=at_once)
        torch.set_num_threads(self._threads)


def _local_ranks(launcher: str, torchrun: Torchrun | None, mesh: Mesh) -> int:
    """How many ranks share this machine's cores with this one, itself included, as far as it can know."""
    if torchrun is not None:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if launcher == "ray" else mesh.size
