"""The executor of a mesh: this process is rank 0, schedules, and computes its own part between telling the others."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from modelbay.cli.interrupt import interrupts_wait
from modelbay.errors import EngineError, ModelbayError, UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.build import pick_device
from modelbay_runtime.engine.executor import Batches
from modelbay_runtime.engine.rank import Rank
from modelbay_runtime.engine.runner import BatchOutput, Runner
from modelbay_runtime.parallel.channel import Teller
from modelbay_runtime.parallel.groups import RankTraffic
from modelbay_runtime.parallel.launch import LOCALHOST, Processes, Started, Torchrun, check_room, listening_store
from modelbay_runtime.parallel.member import Member, ThreadShare, place_device
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.worker import applied, run_lane, serve
from modelbay_runtime.parallel.world import World

#: Seconds that a rank which broke a connection may take to leave word of why.
_LAST_WORDS_S = 5.0
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)


class DistributedExecutor:
    """See `modelbay_runtime.engine.executor.Executor`.

    Under torchrun every process of the mesh runs the user's program and comes here; all but rank 0 compute until rank 0
    closes its model, and end then.
    """

    rank: Rank
    runner: Runner

    def __init__(self, resolution: Resolution, mesh: Mesh) -> None:
        self.lanes, self.depth = mesh.dp, mesh.pp
        self._mesh, self._rounds = mesh, deque[Batches]()
        self._computed = deque[list[BatchOutput | None]]()  # and not collected yet
        self._timeout = resolution.args.distributed_timeout_seconds
        self._owner = os.getpid()
        self._broken: str | None = None
        self._teller: Teller | None = None
        self._unclosed: weakref.finalize[Any, DistributedExecutor] | None = None
        self._started: Started | None = None
        launcher, torchrun = resolution.args.distributed_executor_backend, Torchrun.found()
        if launcher == "torchrun" and torchrun is None:
            raise UsageError("distributed_executor_backend torchrun: this process was not started by it.")
        joins = torchrun if launcher in ("auto", "torchrun") else None
        self._threads = ThreadShare(_local_ranks(launcher, joins, mesh))
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
        assert self._teller is not None, "set up"
        self._unclosed = weakref.finalize(
            self, _abandon, self._owner, self._teller, self._member.world, self._started, self._threads
        )

    def _start(self, resolution: Resolution) -> None:
        """Start the other ranks on this machine."""
        check_room(self._mesh, pick_device(resolution.args.device))
        store = listening_store(self._mesh.size, self._timeout)
        self._started = Processes(resolution, self._mesh, store.port)
        self._set_up(resolution, store, LOCALHOST, local_rank=0)

    def _start_on_ray(self, resolution: Resolution) -> None:
        """Let Ray start the other ranks, on whatever machines of its cluster have room."""
        from modelbay_runtime.parallel.ray_launch import RayActors, require_ray

        ray = require_ray()
        host = ray.util.get_node_ip_address()
        store = listening_store(self._mesh.size, self._timeout, host)
        self._started = RayActors(ray, resolution, self._mesh, host, store.port)
        self._set_up(resolution, store, host, local_rank=0)

    def _join(self, torchrun: Torchrun, resolution: Resolution) -> None:
        """Meet the ranks that torchrun started."""
        torchrun.check(self._mesh)
        store, host = torchrun.store(self._timeout), torchrun.host()
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
            self._teller = Teller(self._member.world.control, self._timeout)
            self.rank, self.runner = self._member.load()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def submit(self, batches: Batches) -> None:
        # Ctrl-C comes between two rounds: in the middle of one it would leave the ranks apart.
        with interrupts_wait(), self._explained():
            self._tell(("round", list(batches)))
            self._rounds.append(batches)

    def collect(self) -> list[BatchOutput | None]:
        if not self._computed:
            self._compute()
        return self._computed.popleft()

    def _compute(self) -> None:
        """The oldest round that was submitted and not computed."""
        with interrupts_wait(), self._explained():
            batches = self._rounds.popleft()
            outputs = [run_lane(self.runner, self._mesh, batches[0])]
            for lane, batch in enumerate(batches[1:], start=1):
                leader = self._mesh.leader(lane)
                outputs.append(None if batch is None else self._member.world.receive_object(leader))
            for output in outputs:
                if output is not None and output.logits is not None:
                    output.logits = output.logits.to(self.runner.device)
            self._computed.append(outputs)

    def _settle(self) -> None:
        """Compute what is under way, for whoever collects it later: ranks do what they are told in order, and where
        this one left a round out, those that share its layers would wait in it."""
        while self._rounds:
            self._compute()

    def drop(self) -> None:
        if self._broken is None:
            with contextlib.suppress(ModelbayError):  # it is said again by whatever is asked next
                self._settle()
        self._rounds.clear()
        self._computed.clear()

    def clear_cache(self) -> None:
        if self._broken is None:
            with interrupts_wait(), self._explained():
                self._settle()
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
            self._settle()
            self._tell(("apply", payload))
            found = self._member.world.to_first(applied(payload, self.rank))
        results = []
        for number, pair in enumerate(found):
            fine, result = pickle.loads(pair)
            if not fine:
                raise EngineError(f"the function given to apply_model failed on rank {number}: {result}")
            results.append(result)
        return results

    def traffic(self) -> list[RankTraffic]:
        with self._explained():
            self._settle()
            self._tell(("traffic",))
            return self._member.world.to_first(self._member.world.traffic())

    def failed(self) -> str | None:
        if self._broken is None and self._started is not None and (words := self._started.failed()):
            self._broken = words
            self._end(at_once=True)
        return self._broken

    def _tell(self, command: Any) -> None:
        if self._broken is not None:
            raise EngineError(f"this model cannot be used any more: {self._broken}", hint="Load it again.")
        if os.getpid() != self._owner:
            raise EngineError("this process is a copy (a fork) of the one that leads the model's ranks, and cannot.")
        assert self._teller is not None, "set up before anything is told"
        self._teller.tell(command)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever is raised between ranks leaves them apart for good; where a rank ended, its words are the reason."""
        try:
            yield
        except BaseException as error:
            if self._broken is not None or os.getpid() != self._owner:
                raise
            of_connection = isinstance(error, RuntimeError)  # c10d's, if not the model's own
            # A connection that broke was broken by somebody; whatever else fails here failed by itself.
            words = self._started.wait_failed(_LAST_WORDS_S) if of_connection and self._started is not None else None
            self._broken = words or self._reason(error)
            self._end(at_once=True)
            if of_connection:
                raise EngineError(self._broken) from error
            raise

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt):
            return "it was interrupted while ranks waited for each other."
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(reason):
            return (
                f"no answer from another rank within distributed_timeout_seconds = {self._timeout:g}, which the "
                f"slowest step of any rank must not exceed ({reason})."
            )
        return reason

    # ---- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._broken is not None or os.getpid() != self._owner:
            return
        with contextlib.suppress(ModelbayError), self._explained():  # somebody may be gone already
            self._settle()
            self._tell(("close",))
        if self._broken is None:
            self._broken = "it was closed."
            self._end(at_once=False)
            self._member.world.let_go()

    def _end(self, *, at_once: bool) -> None:
        if self._unclosed is not None:
            self._unclosed.detach()
        if self._teller is not None:
            self._teller.close()
        if self._started is not None:
            self._started.end(at_once=at_once)
        self._threads.give_back()


def _abandon(owner: int, teller: Teller, world: World, started: Started | None, threads: ThreadShare) -> None:
    """The end of a model that nobody closed: it became garbage, or the interpreter ends."""
    if os.getpid() != owner:
        return
    if started is None:  # torchrun's ranks end well only if they are told to
        with contextlib.suppress(RuntimeError):
            teller.tell(("close",))
    teller.close()
    if started is not None:
        started.end(at_once=True)
    world.let_go()
    threads.give_back()


def _local_ranks(launcher: str, torchrun: Torchrun | None, mesh: Mesh) -> int:
    """How many ranks share this machine's cores with this one, itself included, as far as it can know."""
    if torchrun is not None:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 1 if launcher == "ray" else mesh.size
