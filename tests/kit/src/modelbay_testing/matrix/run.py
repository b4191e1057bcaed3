"""Try many cases in worker processes: one that crashes or hangs costs its case, not the run."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from modelbay_testing.matrix.attempt import Outcome
from modelbay_testing.matrix.cases import NOTES, Case
from modelbay_testing.matrix.examples import example_of

#: Seconds for one case; nearly all take about one.
_TIMEOUT = 180
Result = TypeVar("Result")


def run_cases(cases: Iterable[Case], workers: int = 2) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    return on_workers(cases, lambda worker, case: _described(worker.try_case(case)), workers)


def on_workers(cases: Iterable[Case], ask: Callable[[Worker, Case], Result], workers: int) -> Iterator[Result]:
    """``ask`` of every case and a worker that is free; the results in the order of the cases, as they come."""
    made = [Worker() for _ in range(workers)]
    free: queue.Queue[Worker] = queue.Queue()
    for worker in made:
        free.put(worker)

    def one(case: Case) -> Result:
        worker = free.get()
        try:
            return ask(worker, case)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(workers) as threads:
            yield from threads.map(one, cases)
    finally:
        for worker in made:
            worker.stop()


def _described(outcome: Outcome) -> Outcome:
    note = NOTES.get(outcome.model_type, "") if outcome.outcome == "matches" else ""
    return dataclasses.replace(outcome, example=example_of(outcome.model_type), note=note)


class Worker:
    """A process of `modelbay_testing.matrix.worker`, started when it is first needed and again after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def try_case(self, case: Case) -> Outcome:
        answer, reason = self.ask(case.name)
        if answer:
            return Outcome(**json.loads(answer))
        return Outcome(case.task, case.model_type, case.architecture, "fails", reason)

    def ask(self, name: str) -> tuple[str, str]:
        """The worker's line for a name; empty if its process came to an end, and how it did."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(_TIMEOUT, process.kill)
        alarm.start()
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            late = not alarm.is_alive()
            alarm.cancel()
        if answer:
            return answer, ""
        self.stop()
        return "", f"it took more than {_TIMEOUT} s" if late else f"its process ended with {process.returncode}"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", "modelbay_testing.matrix.worker"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
