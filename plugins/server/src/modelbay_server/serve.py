"""Running the application under uvicorn, until a signal ends it."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from modelbay.errors import ModelbayError, UsageError
from modelbay_server.app import create_app
from modelbay_server.models import ServedModel
from modelbay_server.settings import ServerSettings

logger = logging.getLogger("modelbay_server")


def serve(settings: ServerSettings, models: list[ServedModel]) -> None:
    """Serve until SIGTERM or SIGINT. Then no new connection is taken, and requests that run are finished, for as long
    as ``shutdown_timeout``; a second SIGINT ends them at once.

    Raises:
        ModelbayError: the first model could not be loaded, or the address is not to be had.
    """
    failures: list[Exception] = []

    def failed(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    with log_lines():
        app = create_app(settings, models, on_load_failure=failed)
        pool = app.state.server.pool
        pool.on_load = pool.on_unload = _settle_heap
        server = uvicorn.Server(uvicorn_config(app, settings))
        listener = _listen(settings)
        with listener, _signals_end_quietly():
            scheme = "https" if settings.ssl_certfile else "http"
            logger.info("listening on %s://%s", scheme, _address(listener))
            server.run(sockets=[listener])
    for error in failures:
        if isinstance(error.__cause__, UsageError):  # arguments that make no sense: the exit code says so
            raise UsageError(str(error)) from error
        raise error if isinstance(error, ModelbayError) else ModelbayError(str(error))


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """How the application is run. uvicorn's own access log stays off: it would write queries down."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_timeout)),
        h11_max_incomplete_event_size=64 * 1024,
    )


def _settle_heap() -> None:
    """Free what is garbage, and leave what stays (modules, models) out of later collections: one that looks at all of
    it stops every thread, and so every stream, for some tenths of a second."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _listen(settings: ServerSettings) -> socket.socket:
    """Bound before anything is loaded, so that a port in use is said at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Of a socket that does not say that it is TCP, asyncio leaves Nagle's algorithm on: the first event of a stream
    # would wait until the client has acknowledged the headers, which takes it up to 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {reason}.", hint="Choose another with --port."
        ) from error
    listener.set_inheritable(False)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn sends itself the signal again after it has shut down; by then the work is done, and the exit code 0."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: Any) -> None:
    """Not SIG_IGN, which child processes would inherit."""


@contextmanager
def log_lines() -> Iterator[None]:
    """The server's own lines on standard error, and uvicorn's from warnings on. A full disk ends no request."""
    handler = _Lines(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {"modelbay_server": logging.INFO, "uvicorn": logging.WARNING}
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in levels}
    for name, level in levels.items():
        target = logging.getLogger(name)
        target.addHandler(handler)
        target.setLevel(level)
        target.propagate = False
    try:
        yield
    finally:
        for name, (level, propagate) in before.items():
            target = logging.getLogger(name)
            target.removeHandler(handler)
            target.setLevel(level)
            target.propagate = propagate


class _Lines(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Where a line cannot be written there is no place to say so."""
