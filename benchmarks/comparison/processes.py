"""The parent's side of a worker: start it, ask it, keep it from running while another is measured, end it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from modelbay.errors import EngineError

#: The folder that holds this package, for a worker whose interpreter has never heard of it.
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 1800.0
_SHOWN_LINES = 5


@dataclass(frozen=True)
class EngineSpec:
    """An engine to compare: the class in the worker, the interpreter that has its library, and what it is given."""

    name: str
    target: str
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def command(self) -> list[str]:
        return [self.python, "-m", "comparison.worker", json.dumps({"target": self.target, **self.settings})]

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", **self.env}


class ProcessGroup:
    """A process and whatever it starts, which can be stopped where it stands while another is measured."""

    _process: subprocess.Popen[Any]

    def pause(self) -> None:
        """Stop it where it stands, threads that spin for work included."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """What it has used so far, with its children."""
        process = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:  # not waited for yet, so the group's id is still its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class Worker(ProcessGroup):
    """A running worker. A context manager: leaving it ends the process and whatever that started."""

    def __init__(self, spec: EngineSpec) -> None:
        self.name = spec.name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        self._process = self._start(spec)
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, **request: Any) -> None:
        """Queue a request, which may be before the engine is loaded.

        Raises:
            EngineError: the worker is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def answer(self, timeout: float = TIMEOUT) -> dict[str, Any]:
        """The next answer; the first is sent when the engine is loaded.

        Raises:
            EngineError: the engine failed, the worker ended, or it took too long.
        """
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise EngineError(f"engine {self.name} did not answer within {timeout:.0f} s.") from None
        if line is None:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"engine {self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Idempotent; the group is killed, since a paused or busy process would not hear anything gentler."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that nobody read
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, spec: EngineSpec) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen(
                spec.command(),
                env=spec.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                process_group=0,  # of its own, so that what the engine starts is paused and ended with it
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"engine {spec.name}: {spec.python}: {error.strerror}.") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _ended(self) -> EngineError:
        self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing on standard error"
        return EngineError(f"engine {self.name} ended with code {self._process.returncode}: {said}")
