"""Errors as clients of OpenAI's API expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from modelbay.errors import EngineError, ModelbayError, TokenizerError, UsageError

logger = logging.getLogger("modelbay_server")

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


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that is wrong with a request body. Says where and what, and repeats little of the body."""
    if not errors:
        return ApiError(400, "the request is not valid.")
    first = errors[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON.")
    if first["type"] == "missing" and not path:
        return ApiError(400, "the body is empty: a JSON object was expected.")
    if first["type"] in ("model_attributes_type", "dict_type", "model_type") and not path:
        return ApiError(
            400, "the body must be a JSON object, sent as Content-Type: application/json.", code="invalid_body"
        )
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {_short(param)}.", param=_short(param), code="unknown_field")
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    where = f"{_short(param)}: " if param else ""
    return ApiError(400, f"{where}{message}.", param=_short(param))


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= 200 else f"{text[:200]}…"
