"""One client's requests to an engine, seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

#: `RequestOutput` or one of the pooling outputs; all have ``finished``.
Output = Any


class Job:
    """Requests that were submitted together: one for each prompt of an HTTP request.

    It keeps the latest output of each request and nothing else. Outputs hold everything so far, so a client that reads
    slowly costs no more memory than one that reads fast: what it missed is in the next one it gets.

    Only the event loop that made it may touch it.
    """

    def __init__(self, size: int, abort: Callable[[], None]) -> None:
        self.size = size
        self._abort = abort
        self._admitted = False
        self._error: Exception | None = None
        self._latest: dict[int, Output] = {}
        self._fresh: set[int] = set()
        self._changed = asyncio.Event()

    # ---- what the engine's side reports ----------------------------------------------------------------------------

    def admit(self) -> None:
        """All requests are in the engine."""
        self._admitted = True
        self._changed.set()

    def put(self, index: int, output: Output) -> None:
        """A newer output of one request."""
        self._latest[index] = output
        self._fresh.add(index)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """No more outputs will come."""
        self._error = self._error or error
        self._changed.set()

    # ---- what the client's side asks -------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether nothing of this job is left in the engine."""
        return self._error is not None or sum(out.finished for out in self._latest.values()) == self.size

    async def admitted(self) -> None:
        """Wait until the engine has taken the requests.

        Raises:
            UsageError: it refused one; none of them runs. Or whatever ended the engine.
        """
        while not self._admitted:
            await self._change()

    async def updates(self) -> AsyncIterator[Mapping[int, Output]]:
        """The newest outputs of the requests that have any news, until all are finished."""
        while True:
            while not self._fresh:
                if self.done and self._error is None:
                    return
                await self._change()
            fresh, self._fresh = self._fresh, set()
            yield {index: self._latest[index] for index in sorted(fresh)}

    async def results(self) -> list[Output]:
        """The finished outputs, in order."""
        async for _ in self.updates():
            pass
        return [self._latest[index] for index in range(self.size)]

    def close(self) -> None:
        """The client wants no more: what still runs is aborted. Idempotent."""
        if not self.done:
            self.fail(RuntimeError("this job was closed"))
            self._abort()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
