"""How the processes of a mesh come to be: started from this one, or started by torchrun and met here.

Either way every process runs the same program after that. A process that is started here is a fresh interpreter, not a
copy of this one: the user's script is not run again, and needs no guard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from modelbay.args import EngineArgs
from modelbay.errors import EngineError, UsageError
from modelbay.resolve import Resolution
from modelbay_runtime.parallel.mesh import Mesh

LOCALHOST = "127.0.0.1"
_POLL_S = 0.05
#: What a rank's interpreter takes once it has imported torch and Transformers (measured: 0.3 to 0.4 GiB).
_RANK_BYTES = 400 << 20
#: Seconds that a process which was told to end may take.
_GRACE_S = 10.0
#: Exit code of a rank that lost rank 0: it has nothing to say.
LOST = 3  # as in `__main__`, which imports nothing


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a started process needs to take its place.

    Attributes:
        args: the engine arguments, the revision pinned. module_plugins: names of modules given as plugins.
        host, port: of the store where ranks meet. path: where modules are looked for.
        folder: where it leaves word of how it failed.
    """

    args: EngineArgs
    module_plugins: tuple[str, ...]
    rank: int
    host: str
    port: int
    path: tuple[str, ...]
    folder: str


def listening_store(size: int, timeout: float, host: str = LOCALHOST) -> Any:
    """A store at this address alone: by default only processes of this machine can reach it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, size, is_master=True, timeout=timedelta(seconds=timeout), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def joined_store(host: str, port: int, size: int, timeout: float) -> Any:
    return dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def check_room(mesh: Mesh, device: torch.device) -> None:
    """Refuse more ranks than this machine has room for, before one of them is started.

    Raises:
        UsageError: fewer GPUs than ranks, or not the memory for their interpreters alone; with the numbers.
    """
    if device.type == "cuda":
        if torch.cuda.device_count() < mesh.size:
            raise UsageError(
                f"{mesh} need a GPU each, and this machine has {torch.cuda.device_count()}.",
                hint="Ask for fewer, or use several machines: torchrun, or distributed_executor_backend=ray.",
            )
        return
    free = psutil.virtual_memory().available
    if mesh.size * _RANK_BYTES > free:
        raise UsageError(
            f"{mesh} take about {mesh.size * _RANK_BYTES / 2**30:,.1f} GiB before they hold any weights, and "
            f"{free / 2**30:,.1f} GiB are free.",
            hint="Ask for fewer; `modelbay plan` looks at any number without starting one.",
        )


class Started(Protocol):
    """The ranks that this process had started."""

    def failed(self) -> str | None:
        """What the first rank that ended has to say, or None."""
        ...

    def wait_failed(self, seconds: float) -> str | None:
        """As `failed`; a rank that is about to end is given some time for it."""
        ...

    def end(self, *, at_once: bool = False) -> None:
        """Wait for ranks that were told to end, end those that do not, leave nothing behind. Idempotent."""
        ...


def await_words(failed: Callable[[], str | None], seconds: float) -> str | None:
    """What ``failed`` says, as soon as it says something, within that time."""
    until = time.monotonic() + seconds
    while (found := failed()) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return found


class Processes:
    """Ranks that are processes of this machine. See `Started`.

    Raises:
        UsageError: arguments that another process cannot be told.
    """

    def __init__(self, resolution: Resolution, mesh: Mesh, port: int) -> None:
        args, modules = portable(resolution)
        self._owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="modelbay-"))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, mesh.size):
                bootstrap = Bootstrap(args, modules, rank, LOCALHOST, port, tuple(sys.path), str(self.folder))
                self.processes[rank] = self._start(bootstrap)
        except BaseException:
            self.end(at_once=True)
            raise

    def _start(self, bootstrap: Bootstrap) -> subprocess.Popen[bytes]:
        file = self.folder / f"start-{bootstrap.rank}"
        file.write_bytes(pickle.dumps(bootstrap))
        return subprocess.Popen(
            # -P: what lies in the current directory is no part of Python, as it is not for this process.
            [sys.executable, "-P", "-m", "modelbay_runtime.parallel", str(file)],
            stdin=subprocess.PIPE,  # closes when this process ends, however it ends, and then the rank ends too
            process_group=0,  # the terminal's Ctrl-C is for this process: it decides what ends
        )

    def failed(self) -> str | None:
        return first_cause(
            {rank: process.pid for rank, process in self.processes.items()},
            {rank: code for rank, process in self.processes.items() if (code := process.poll()) is not None},
            self.folder,
        )

    def wait_failed(self, seconds: float) -> str | None:
        return await_words(self.failed, seconds)

    def end(self, *, at_once: bool = False) -> None:
        if os.getpid() != self._owner:
            return  # a copy of that process, by fork: the ranks are not its own
        until = time.monotonic() + (0 if at_once else _GRACE_S)
        try:
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:  # also where Ctrl-C cut the waiting short
            for process in self.processes.values():
                process.kill()  # nothing, if it ended by itself
            for process in self.processes.values():
                process.wait()
                assert process.stdin is not None, "it was made as a pipe"
                process.stdin.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def first_cause(pids: Mapping[int, int], codes: Mapping[int, int], folder: Path) -> str | None:
    """What the rank that ended first has to say; the others ended because it did.

    A rank that was ended from outside leaves no word, and those that miss it may leave theirs before anyone looks.

    Args:
        codes: the exit codes of ranks that ended. folder: with the words that they left.
    """
    words = {rank: folder / f"error-{rank}" for rank in codes if (folder / f"error-{rank}").exists()}
    silent = [rank for rank, code in codes.items() if rank not in words and code != LOST]
    if not silent and words:
        return min(words.values(), key=lambda file: file.stat().st_mtime_ns).read_text()
    for rank in silent or codes:
        code = codes[rank]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} (process {pids[rank]}) {how}"
    return None


def portable(resolution: Resolution) -> tuple[EngineArgs, tuple[str, ...]]:
    """The arguments as another process can use them: the commit in place of a branch, modules by their names.

    Raises:
        UsageError: a plugin module that another process cannot import, or an argument that it cannot be told.
    """
    args, modules = resolution.args, []
    names: list[Any] = []
    for plugin in args.plugins or ():
        if not isinstance(plugin, ModuleType):
            names.append(plugin)
            continue
        if plugin.__name__ == "__main__" or getattr(plugin, "__spec__", None) is None:
            raise UsageError(
                f"plugin module {plugin.__name__!r} exists in this process only, and other ranks cannot import it.",
                hint="Put it into a file of its own that is on sys.path, or install it.",
            )
        modules.append(plugin.__name__)
    changes: dict[str, Any] = {"plugins": names if args.plugins is not None and (names or not modules) else None}
    if resolution.files.commit is not None:
        changes["revision"] = resolution.files.commit
    args = args.replace(**changes)
    for entry in fields(args):
        try:
            pickle.dumps(value := getattr(args, entry.name))
        except Exception as error:
            raise UsageError(
                f"{entry.name} = {value!r} cannot be sent to other ranks: {error}.",
                hint="Say it as plain data, or with a function of a module that they can import.",
            ) from error
    return args, tuple(modules)


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What torchrun told this process."""

    rank: int
    size: int
    address: str

    @classmethod
    def found(cls, environ: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None if this process was not started by it."""
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(environ.get(name) for name in needed):
            return None
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]), environ["MASTER_ADDR"])

    def check(self, mesh: Mesh) -> None:
        """Raises:
        UsageError: it started another number of processes than the arguments ask for.
        """
        if self.size != mesh.size:
            raise UsageError(
                f"torchrun started {self.size} processes, and the arguments ask for {mesh}.",
                hint="Make --nnodes times --nproc-per-node that number.",
            )

    def store(self, timeout: float) -> Any:
        """torchrun's own store.

        Raises:
            EngineError: it cannot be reached.
            UsageError: another model of this program has met there.
        """
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout))))
        except Exception as error:
            raise EngineError(f"rank {self.rank} cannot reach torchrun's store at {self.address}: {error}") from error
        store.set_timeout(timedelta(seconds=timeout))
        store = dist.PrefixStore("modelbay", store)
        if self.rank == 0:
            self._check_first(store)
        return store

    @staticmethod
    def _check_first(store: Any) -> None:
        if store.check(["taken"]):
            raise UsageError(
                "the processes that torchrun started serve one model, and this program opened one before.",
                hint="Start another program for this one.",
            )
        store.set("taken", b"")

    def host(self) -> str:
        """This machine's address on the way to the first one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, 9))  # sends nothing
            return str(probe.getsockname()[0])
