"""Answers that go out while they come in, and clients that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from modelbay_server.answers.json_text import json_blocks, json_bytes, short_json
from modelbay_server.errors import error_body, reported, shutting_down

DONE = b"data: [DONE]\n\n"

#: Seconds after which a client that reads nothing at all is given up.
READ_TIMEOUT = 120.0
#: Seconds of one stream after which others get their turn.
TURN = 0.005
#: Entries (log-probabilities, token ids) up to which an answer, or a piece of one, is made in the event loop.
INLINE = 2000

#: Runs a function on another thread.
Beside = Callable[[Callable[[], Any]], Awaitable[Any]]


def event(data: Any, *, long: bool = False) -> bytes:
    """One server-sent event."""
    return b"data: " + (json_bytes(data) if long else short_json(data)) + b"\n\n"


async def made(entries: int, make: Callable[[], Any], beside: Beside) -> Any:
    """The event that ``make`` gives, if it gives one: as a JSON value, or written already.

    Args:
        entries: how much there is in it. What takes long is made and written ``beside`` the event loop.
    """
    if entries <= INLINE:
        return make()

    def written() -> bytes | None:
        data = make()
        return None if data is None else event(data, long=True)

    return await beside(written)


async def json_answer(entries: int, make: Callable[[], Any], beside: Beside) -> Response:
    """The response whose body ``make`` gives, made and written ``beside`` the event loop if there is much in it."""

    if entries <= INLINE:
        return JsonAnswer([short_json(make())])

    def written() -> list[bytes]:
        return json_blocks(make())

    return JsonAnswer(await beside(written))


class JsonAnswer(Response):
    """JSON text that is sent block by block, as fast as the client reads."""

    media_type = "application/json"

    def __init__(self, blocks: Sequence[bytes]) -> None:
        super().__init__(headers={"Content-Length": str(sum(map(len, blocks)))})
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(TimeoutError):  # then the body stays without its end, and the connection is closed
            for number, block in enumerate(self._blocks, 1):
                async with asyncio.timeout(READ_TIMEOUT):
                    await send({"type": "http.response.body", "body": block, "more_body": number < len(self._blocks)})
                await asyncio.sleep(0)


class EventStream(Response):
    """Server-sent events from an async iterator of JSON values, or of events that `made` has written; with ``[DONE]``
    at the end.

    Whatever ends it (the last event, an error, a client that goes away) closes ``resources``. An error after the first
    byte is the last event, since the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources
        self._begun = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                await _first(self._send_all(send), _disconnected(receive))
            except asyncio.CancelledError:  # the server ends, and waits no longer
                if not self._begun:
                    raise
                if not self._ended:
                    await self._end(send, shutting_down())

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._begun = True
        try:
            began = sent = time.monotonic()
            async for data in self._events:
                if time.monotonic() - sent > TURN:  # it has waited for this one, so others had their turn
                    began = time.monotonic()
                body = data if isinstance(data, bytes) else event(data)
                async with asyncio.timeout(READ_TIMEOUT):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                sent = time.monotonic()
                if sent - began > TURN:  # sending to a client that reads fast waits for nothing
                    await asyncio.sleep(0)
                    began = sent = time.monotonic()
        except TimeoutError:
            return  # without the end of the body, so that the connection is closed and not used again
        except Exception as error:
            await self._end(send, error)
        else:
            await self._end(send)

    async def _end(self, send: Send, error: Exception | None = None) -> None:
        if error is not None:
            body = event(error_body(reported(error)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
        self._ended = True


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """``work``'s response; when the client goes away first, ``work`` is cancelled and cleans up behind itself."""
    response = await _first(work, _disconnected(request.receive))
    return response or Response(status_code=499)


async def _first(work: Coroutine[Any, Any, Any], gone: Coroutine[Any, Any, None]) -> Any:
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        watch.cancel()
        await asyncio.wait({task, watch})  # whoever is cancelled here is still waited for
    return None if task.cancelled() else task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
