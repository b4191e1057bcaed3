"""JSON bodies, read so that nothing a client sends is an error of ours."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from modelbay_server.errors import ApiError

#: Objects and lists within each other. Templates, schema compilers and serialisers recurse over what they get.
MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


def parse_json(body: bytes) -> Any:
    """The value of a JSON text: finite numbers, whole characters, and not too deep.

    Raises:
        ApiError: 400, with what is wrong.
    """
    try:
        # Decoded here: `json` would let the halves of characters through that UTF-8 forbids.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 text (byte {error.start}).") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno}).") from None
    except ValueError:  # an integer of thousands of digits
        raise ApiError(400, "the body holds a number that is too long.") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(body):
        _check_text(value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body holds {name}, which is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ApiError(400, f"the body holds the number {text[:40]}, which is too large for a number of 64 bits.")
    return value


def _too_deep() -> ApiError:
    return ApiError(400, f"the body nests objects and lists more than {MAX_DEPTH} deep.")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        inside: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            inside += [child for child in children if isinstance(child, dict | list)]
        level = inside
    raise _too_deep()


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ApiError(400, f"the body holds half of a character (U+{half:04X}), which is no text.") from None


class _JsonRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse_json(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A route whose JSON bodies are read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle
