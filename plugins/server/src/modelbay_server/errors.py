"""Errors as clients of OpenAI's API expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from modelbay.errors import EngineError, ModelbayError, TokenizerError, UsageError

logger = logging.getLogger("modelbay_server")

#: Where something is in a request: names of fields, and places in lists.
Path = tuple[str | int, ...]
_NOTHING = object()
#: What pydantic calls an object, with the name of our class for it.
_OBJECT = re.compile(r"a valid dictionary(?: or (?:an )?(?:object to extract fields from|instance of \w+))?")

#: How pydantic begins where a value is of another kind than the field.
_KIND = "Input should be "

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(HTTPException):
    """A refusal, as the client sees it.

    Args:
        status: HTTP status. param: the field that is to blame. code: a name for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code


class ModelUnavailableError(ModelbayError):
    """The model cannot answer now: its engine has died, it could not be loaded, or the server is shutting down."""


def shutting_down() -> ModelUnavailableError:
    """What requests are told that outlast the time they get when the server ends."""
    return ModelUnavailableError("the server is shutting down, and the time for requests to finish is over.")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of ours. What the request caused is 400; what it did not, is not."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError | TokenizerError):
        return ApiError(400, str(error))
    if isinstance(error, ModelUnavailableError):
        return ApiError(503, str(error), code="model_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    return ApiError(500, "the server met an error that it did not expect.", code="internal_error")


def reported(error: Exception) -> ApiError:
    """`as_api_error`; what nobody expected is logged."""
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        log_fault("a request met a fault", error)
    return api_error


def log_fault(what: str, error: Exception) -> None:
    """Where it happened, and not what it said: that may be text of a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, frames)


def error_body(error: ApiError) -> dict[str, Any]:
    default = "invalid_request_error" if error.status_code < 500 else "server_error"
    kind = _TYPES.get(error.status_code, default)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    # ASCII: whatever half of a character a client sent, the message about it can be sent back.
    content = json.dumps(error_body(error)).encode()
    return Response(content, error.status_code, headers=error.headers, media_type="application/json")


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """The first thing that is wrong with a request. Says where and what, and repeats little of it.

    Args:
        errors: as pydantic lists them.
        body: what they are about, parsed; None where that is the query.
    """
    if not errors:
        return ApiError(400, "the request is not valid.")
    path, told = _first_of(errors, body)
    kind, param = told[0]["type"], _short(".".join(map(str, path)) or None)
    if kind == "json_invalid":
        return ApiError(400, "the body is not JSON.")
    if kind == "missing" and not path:
        return ApiError(400, "the body is empty: a JSON object was expected.")
    if kind in ("model_attributes_type", "dict_type", "model_type") and not path:
        return ApiError(
            400, "the body must be a JSON object, sent as Content-Type: application/json.", code="invalid_body"
        )
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {param}.", param=param, code="unknown_field")
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{_message(told)}.", param=param)


def _first_of(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[Path, list[Mapping[str, Any]]]:
    """The first field that has errors, and these. Of a field that may be one thing or another every way to read it has
    some; those that are about what is within it know best what was meant."""
    paths = [_path(error, body) for error in errors]
    start = paths[0]
    within = [path for path in paths if path[: len(start)] == start] if start else [start]
    deepest = max(within, key=len)
    return deepest, [error for path, error in zip(paths, errors, strict=True) if path == deepest]


def _path(error: Mapping[str, Any], body: Any) -> Path:
    """Where it is in the request. pydantic's own path also names the ways in which it tried to read a field; they
    stand nowhere in the body."""
    where, *parts = error["loc"]
    if where != "body":
        return tuple(parts)
    # What is missing is nowhere in the body either, and the last part names it.
    missing = parts[-1:] if error["type"] == "missing" else []
    found: list[str | int] = []
    value = body
    for part in parts[: len(parts) - len(missing)]:
        if found and value is error.get("input") and not missing:
            break
        inner = _inside(value, part)
        if inner is not _NOTHING or value is body:
            found.append(part)
            value = inner
    return (*found, *missing)


def _inside(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part, _NOTHING)
    if isinstance(value, list) and isinstance(part, int) and part < len(value):
        return value[part]
    return _NOTHING


def _message(errors: Sequence[Mapping[str, Any]]) -> str:
    """Of a field that may be one thing or another: what is wrong with it as one of them, else all that it may be."""
    texts = [_OBJECT.sub("an object", str(e["msg"])).removeprefix("Value error, ").rstrip(".") for e in errors]
    for text in texts:
        if not text.startswith(_KIND):
            return text
    return _KIND + " or ".join(dict.fromkeys(text.removeprefix(_KIND) for text in texts))


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 200 else f"{text[:200]}…"
