"""The application: routes, guards, errors, and the life of the models in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from modelbay.errors import ModelbayError
from modelbay_server.errors import error_response, reported, validation_error
from modelbay_server.guards import BodyLimit, Key, Record
from modelbay_server.models import ServedModel
from modelbay_server.page_files import mount_page
from modelbay_server.routes import about, catalogue, chat, completions, embeddings, rerank, tokens
from modelbay_server.settings import ServerSettings
from modelbay_server.state import ServerState

logger = logging.getLogger("modelbay_server")

#: The page for browsers: files that are served as they are, at ``/``.
PAGE = Path(__file__).parent / "page"
_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)


def create_app(
    settings: ServerSettings,
    models: list[ServedModel],
    *,
    on_load_failure: Callable[[Exception], None] | None = None,
    page: Path = PAGE,
) -> FastAPI:
    """An ASGI application that serves these models.

    Args:
        on_load_failure: is told, in the event loop, when the first model cannot be loaded at the start.
        page: directory of the page's files; none is served where it does not exist.
    """
    # Telemetry is off: it would record what requests say.
    app = FastAPI(
        title="Modelbay", docs_url=None, redoc_url=None, lifespan=_lifespan(on_load_failure), telemetry=_TELEMETRY
    )
    state = ServerState(settings, models)
    app.state.server = state
    for module in (about, catalogue, completions, chat, embeddings, rerank, tokens):
        app.include_router(module.router)
    for kind in (ModelbayError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    open_paths = {"/health", "/ready", *mount_page(app, page)}
    app.add_middleware(BodyLimit, most=settings.max_request_bytes, pause=settings.body_timeout)
    if settings.api_key is not None:
        app.add_middleware(Key, key=settings.api_key, open_paths=open_paths)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            # Clients in browsers say more than what they need to: which library they are, how often they have tried.
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(
        Record,
        count=lambda route, status: state.metrics.responses.labels(route, str(status)).inc(),
        log=settings.log_requests,
    )
    return app


def _lifespan(on_load_failure: Callable[[Exception], None] | None) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state: ServerState = app.state.server
        state.metrics.cpu.watch_this_thread()
        loading = asyncio.create_task(_preload(state, on_load_failure))
        try:
            yield
        finally:
            loading.cancel()
            await state.pool.close(_end_timeout(state))
            state.close()

    return lifespan


def _end_timeout(state: ServerState) -> float:
    """Seconds that engines get to end: their requests have had theirs already."""
    return min(state.settings.shutdown_timeout, 10.0)


async def _preload(state: ServerState, on_load_failure: Callable[[Exception], None] | None) -> None:
    try:
        await state.pool.preload()
    except Exception as error:
        logger.error("%s", error)
        if on_load_failure is not None:
            on_load_failure(error)
    else:
        logger.info("ready: %s", state.pool.models[0].name)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(reported(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors(), error.body))
