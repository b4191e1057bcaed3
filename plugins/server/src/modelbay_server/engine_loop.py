"""The thread that owns an engine. Whoever wants something of it sends a command; answers go to the event loop.

Nothing else may touch the engine, so it needs no lock, and the event loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from modelbay.errors import EngineError, UsageError
from modelbay_server.errors import ModelUnavailableError, log_fault
from modelbay_server.job import Job, Output
from modelbay_server.stats import EngineStats, engine_stats

logger = logging.getLogger("modelbay_server")
Result = TypeVar("Result")

#: Seconds after which an engine that has nothing to do is asked whether it still could.
CHECK_SECONDS = 1.0
#: Steps that may fail in a row, each ending the requests that ran in it, before the engine counts as dead.
MAX_FAILURES = 3


class Observer(Protocol):
    """Hears of everything that is measured, on the engine's thread."""

    def output(self, output: Output) -> None: ...
    def tokens(self, generated: int) -> None: ...
    def step(self, seconds: float, cpu_outside: float) -> None: ...


@dataclass(frozen=True)
class Item:
    """One request: a `Prompt`, and `SamplingParams` or `PoolingParams`."""

    prompt: Any
    params: Any


@dataclass
class _Entry:
    job: Job
    index: int


class EngineLoop:
    """A model that is loaded, run and closed on a thread of its own.

    Args:
        open_llm: loads the model; called on the thread.
        name: of the thread.
        observer: see `Observer`.

    Made in a running event loop, to which all answers go.
    """

    def __init__(self, open_llm: Callable[[], Any], name: str, observer: Observer) -> None:
        self._aio = asyncio.get_running_loop()
        self._open = open_llm
        self._observer = observer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._entries: dict[str, _Entry] = {}
        self._ids = itertools.count()
        self._failures = 0
        self._closing = self._stopping = False  # as the event loop sees it; as the thread does
        self._llm: Any = None
        self.stats = EngineStats()
        self.failure: Exception | None = None
        self.loaded: asyncio.Future[Any] = self._aio.create_future()
        self.ended: asyncio.Future[None] = self._aio.create_future()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    # ---- from the event loop ---------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it loads, or takes requests."""
        return self._thread.is_alive() and self.failure is None and not self._closing

    def submit(self, items: Sequence[Item], *, stream: bool) -> Job:
        """Queue requests that belong together: all are taken, or none.

        Args:
            stream: whether outputs come as they grow, or only finished.

        Raises:
            ModelUnavailableError: the engine is dead or closing.
        """
        if not self.alive:
            raise self._gone()
        ids = [f"request-{next(self._ids)}" for _ in items]
        job = Job(len(ids), lambda: self._inbox.put(lambda: self._forget(ids)))
        self._inbox.put(lambda: self._add(job, ids, items, stream))
        return job

    def call(self, fn: Callable[[Any], Result]) -> asyncio.Future[Result]:
        """``fn(llm)`` on the engine's thread, between two steps."""
        future: asyncio.Future[Result] = self._aio.create_future()

        def run() -> None:
            try:
                if self._llm is None:
                    raise self._gone()
                result = fn(self._llm)
            except Exception as error:
                self._to_loop(_settle, future, None, error)
            else:
                self._to_loop(_settle, future, result, None)

        self._inbox.put(run)
        return future

    def close(self) -> asyncio.Future[None]:
        """End the thread as soon as its requests are done or aborted; the future tells when."""
        self._closing = True
        self._inbox.put(None)
        return self.ended

    # ---- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._llm = self._open()
        except Exception as error:
            self.failure = error
            self._to_loop(_settle, self.loaded, None, error)
        else:
            self._look()
            self._to_loop(_settle, self.loaded, self._llm, None)
            self._serve()
        self._to_loop(self._finish)

    def _serve(self) -> None:
        try:
            while self.failure is None and self._turn():
                pass
        except Exception as error:  # ours: what the engine raises is handled where it is called
            log_fault("the engine's thread ended", error)
            self._die(EngineError("its thread failed; the server's log says where."))
        while not self._stopping:  # dead: the model stays open, for who is using its tokenizer, and answers no
            self._take(self._inbox.get())
        llm, self._llm = self._llm, None
        llm.close()

    def _turn(self) -> bool:
        """Take what has come, then compute one step. False when there is nothing left to do, ever."""
        cpu = time.thread_time()
        while not self._entries or not self._inbox.empty():
            try:
                self._take(self._inbox.get(timeout=CHECK_SECONDS))
            except queue.Empty:
                if self._cannot_go_on():
                    return False
            if not self._entries:
                self._look()  # so that who asks while nothing runs sees that nothing runs
                if self._stopping:
                    return False
        self._step(time.thread_time() - cpu)
        return True

    def _cannot_go_on(self) -> bool:
        """Whether a process that the engine needs has ended; then it counts as dead."""
        reason = self._llm.engine.executor.failed()
        if reason is not None:
            logger.error("the engine has ended: %s", reason)
            self._die(EngineError(reason))
        return reason is not None

    def _take(self, command: Callable[[], None] | None) -> None:
        if command is None:
            self._stopping = True
        else:
            command()

    def _step(self, cpu_outside: float) -> None:
        began, generated = time.perf_counter(), self._llm.engine.num_generated
        try:
            outputs = self._llm.engine.step()
        except Exception as error:
            self._step_failed(error)
            return
        seconds, cpu = time.perf_counter() - began, time.thread_time()
        self._failures = 0
        self._observer.tokens(self._llm.engine.num_generated - generated)
        self._deliver(outputs)
        self._look()
        self._observer.step(seconds, cpu_outside + time.thread_time() - cpu)

    def _look(self) -> None:
        self.stats = engine_stats(self._llm.engine)

    def _deliver(self, outputs: Sequence[Output]) -> None:
        news: list[tuple[Job, int, Output]] = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            self._observer.output(output)
            if output.finished:
                del self._entries[output.request_id]
            news.append((entry.job, entry.index, output))
        if news:
            self._to_loop(_publish, news)

    def _add(self, job: Job, ids: Sequence[str], items: Sequence[Item], stream: bool) -> None:
        if self._llm is None or self.failure is not None:
            self._to_loop(job.fail, self._gone())
            return
        engine = self._llm.engine
        try:
            for index, (request_id, item) in enumerate(zip(ids, items, strict=True)):
                if hasattr(item.params, "max_tokens"):
                    engine.add_request(request_id, item.prompt, item.params, stream=stream)
                else:
                    engine.add_pooling_request(request_id, item.prompt, item.params)
                self._entries[request_id] = _Entry(job, index)
        except Exception as error:
            self._forget(ids)
            self._to_loop(job.fail, error)
        else:
            self._to_loop(job.admit)

    def _forget(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._entries.pop(request_id, None)
            if self._llm is not None:
                self._llm.engine.abort(request_id)

    def _step_failed(self, error: Exception) -> None:
        """End the requests that the error is about. Where it is about none, all; and soon enough, the engine."""
        if self._cannot_go_on():
            return
        if isinstance(error, EngineError):
            logger.error("a step failed: %s", error)
        else:
            log_fault("a step failed", error)
            error = EngineError("a step of the engine failed; the server's log says where.")
        blamed = [self._entries[name].job for name in error.request_ids if name in self._entries]
        if blamed:
            self._end(blamed, _about_request(error))
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._die(error)
        else:
            self._end([entry.job for entry in self._entries.values()], error)

    def _die(self, error: Exception) -> None:
        self.failure = error
        self._end([entry.job for entry in self._entries.values()], self._gone())

    def _gone(self) -> ModelUnavailableError:
        if self.failure is None:
            return ModelUnavailableError("the model was closed.")
        return ModelUnavailableError(f"the engine has ended: {self.failure}")

    def _end(self, jobs: Sequence[Job], error: Exception) -> None:
        unique = {id(job): job for job in jobs}
        for job in unique.values():
            self._to_loop(job.fail, error)
        for name in [name for name, entry in self._entries.items() if id(entry.job) in unique]:
            del self._entries[name]
            try:
                self._llm.engine.abort(name)
            except Exception as failure:  # an engine that is broken may not even forget
                logger.error("a request could not be aborted: %s", type(failure).__name__)

    def _finish(self) -> None:
        """In the event loop, where commands come from: what came too late for the thread gets an answer too."""
        self._closing = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        _settle(self.ended, None, None)

    def _to_loop(self, fn: Callable[..., object], *args: Any) -> None:
        try:
            self._aio.call_soon_threadsafe(fn, *args)
        except RuntimeError:  # the event loop has ended before us: nobody is left to hear it
            logger.debug("nobody hears the engine any more")


def _about_request(error: Exception) -> Exception:
    """Logits that a request's own parameters spoiled are its fault; those that the model gave are not."""
    return UsageError(str(error)) if "logit_bias" in str(error) else error


def _publish(news: Sequence[tuple[Job, int, Output]]) -> None:
    for job, index, output in news:
        job.put(index, output)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
