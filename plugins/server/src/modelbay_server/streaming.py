"""Answers that go out while they come in, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from modelbay_server.errors import error_body, reported

DONE = b"data: [DONE]\n\n"

#: Seconds after which a client that reads nothing at all is given up.
READ_TIMEOUT = 120.0


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events from an async iterator of JSON values, with ``[DONE]`` at the end.

    Whatever ends it (the last event, an error, a client that goes away) closes ``resources``. An error after the first
    byte is the last event, since the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], resources: AsyncExitStack) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await _first(self._send_all(send), _disconnected(receive))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                async with asyncio.timeout(READ_TIMEOUT):
                    await send({"type": "http.response.body", "body": event(data), "more_body": True})
        except TimeoutError:
            return  # without the end of the body, so that the connection is closed and not used again
        except Exception as error:
            body = event(error_body(reported(error)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


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
