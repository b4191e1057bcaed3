"""What stands before the routes: the key, the size and pace of bodies, and a record of what was answered.

Plain ASGI, since what wraps responses in between would hide a client that goes away.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelbay_server.errors import ApiError, error_response, reported, shutting_down

logger = logging.getLogger("modelbay_server")


class Record:
    """The outermost: counts responses, logs a line for each where wanted, and turns what nobody caught into a 500; into
    a 503 where the server ends and waits no longer.

    Args:
        count: is given the route's path and the status.
        log: whether to log; no text of a request is in the line, and no query, key or header.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None], log: bool) -> None:
        self._app = app
        self._count = count
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            error_seen = reported(error)
            if status:
                raise ConnectionError("the answer was cut short") from None  # the connection is closed, and not reused
            await error_response(error_seen)(scope, receive, watched)
        except asyncio.CancelledError:  # by uvicorn, which would answer in its own way, and log where it came from
            if not status:
                with suppress(asyncio.CancelledError):
                    await error_response(reported(shutting_down()))(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status)
            if self._log:
                seconds = time.perf_counter() - began
                logger.info("%s %s %s %.3fs", scope["method"], route, status or "aborted", seconds)


class Key:
    """Asks for the API key everywhere but at ``open_paths``.

    Args:
        open_paths: what says nothing about requests: health, and the files of the page.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._key = key.encode()
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in self._open or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server asks for an API key: send it as Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._key)


class BodyLimit:
    """Refuses bodies that are too large before they are read, and clients that send them without end.

    Args:
        most: bytes. pause: seconds a client may take for each part.
    """

    def __init__(self, app: ASGIApp, most: int, pause: float) -> None:
        self._app = app
        self._most = most
        self._pause = pause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared[:20]) > self._most:
            await error_response(self._too_large())(scope, receive, send)
            return
        got, complete = 0, False

        async def limited() -> Message:
            nonlocal got, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(self._pause):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "the body did not arrive.", headers={"Connection": "close"}) from None
            got += len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if got > self._most:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._most:,} bytes.", code="too_large", headers={"Connection": "close"}
        )
