"""What all routes share, hung on the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from modelbay_server.limits import Limiter
from modelbay_server.metrics import Metrics
from modelbay_server.models import LoadedModel, ModelPool, ServedModel
from modelbay_server.settings import ServerSettings

Result = TypeVar("Result")

#: Characters up to which a text is encoded at once; above it would hold up everybody's stream.
_INLINE = 4096


class ServerState:
    """Settings, models, limits and measurements of one server."""

    def __init__(self, settings: ServerSettings, models: list[ServedModel]) -> None:
        self.settings = settings
        self.limiter = Limiter(settings.max_concurrent_requests)
        self.metrics = Metrics(lambda: self.pool.snapshots(), lambda: self.limiter.in_flight)
        self.pool = ModelPool(models, settings.model_memory, self.metrics.observer)
        self._texts = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._media = ThreadPoolExecutor(4, thread_name_prefix="media")
        self._answers = ThreadPoolExecutor(2, thread_name_prefix="answer")

    @asynccontextmanager
    async def model(self, served: ServedModel) -> AsyncIterator[LoadedModel]:
        """A place among the requests that run, and the model in it."""
        with self.limiter.slot():
            async with self.pool.use(served) as loaded:
                yield loaded

    async def with_text(self, length: int, fn: Callable[[], Result], *, media: bool = False) -> Result:
        """``fn()``, which works on so many characters; beside the event loop where that takes long.

        ``media``: it fetches and decodes images or audio, in threads of its own: texts do not wait for other hosts.
        """
        return fn() if length <= _INLINE and not media else await self.beside(fn, media=media)

    async def beside(self, fn: Callable[[], Result], *, media: bool = False) -> Result:
        """``fn()`` on another thread."""
        return await self._on(self._media if media else self._texts, fn)

    async def answering(self, fn: Callable[[], Result]) -> Result:
        """``fn()``, which makes a large answer, on another thread than texts: those are small, and do not wait."""
        return await self._on(self._answers, fn)

    async def _on(self, pool: ThreadPoolExecutor, fn: Callable[[], Result]) -> Result:
        def counted() -> Result:
            with self.metrics.cpu.counted():
                return fn()

        return await asyncio.get_running_loop().run_in_executor(pool, counted)

    def close(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._media.shutdown(wait=False, cancel_futures=True)
        self._answers.shutdown(wait=False, cancel_futures=True)


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(server_state)]
