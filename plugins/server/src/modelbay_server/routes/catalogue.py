"""What is installed: the plugins, and the architectures that they serve."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from modelbay.architectures import architectures, architectures_of_backends
from modelbay.registry import Plugins
from modelbay_server.state import ServerState, State

router = APIRouter(tags=["about"])


@router.get("/v1/modelbay/plugins")
async def plugins(state: State) -> Response:
    """The plugins that this server sees: what each registers, and which failed and why. As `modelbay list-plugins`."""
    return JSONResponse({"plugins": [record.to_dict() for record in _plugins(state).records]})


@router.get("/v1/modelbay/architectures")
def served_architectures(state: State) -> Response:
    """The architectures that they serve; ``backend_only`` are those without a native family. As `list-archs`."""
    # Not in the event loop: a backend may import a library to answer.
    found = _plugins(state)
    listed: list[dict[str, Any]] = [
        arch.to_dict() | {"backend_only": backend_only}
        for backend_only, group in ((False, architectures(found)), (True, architectures_of_backends(found)))
        for arch in group
    ]
    return JSONResponse({"architectures": listed})


def _plugins(state: ServerState) -> Plugins:
    """All models of a server were resolved with the same ones."""
    return state.pool.models[0].resolution.plugins
