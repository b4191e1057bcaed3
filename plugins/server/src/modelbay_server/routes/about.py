"""What the server says about itself: health, version, models, measurements, decisions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from modelbay_server.models import ServedModel
from modelbay_server.state import State

router = APIRouter(tags=["about"])

_PACKAGES = ("modelbay", "modelbay-runtime", "modelbay-server", "torch", "transformers")


@router.get("/health")
async def health(state: State) -> Response:
    """200 while the process can serve; 503 with the reasons once an engine has died, and it should be replaced."""
    failures = state.pool.failures()
    body = {"status": "failed", "failures": failures} if failures else {"status": "ok"}
    return JSONResponse(body, 503 if failures else 200)


@router.get("/ready")
async def ready(state: State) -> Response:
    """200 when a model is loaded and its engine takes requests; 503 before, and when the server shuts down."""
    models = [name for name, _ in state.pool.snapshots()]
    return JSONResponse({"ready": bool(models), "loaded": models}, 200 if models else 503)


@router.get("/version")
async def versions() -> Response:
    """Versions of the server and what it stands on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # of a vendored or renamed build
            found[name] = "unknown"
    return JSONResponse({"version": found["modelbay-server"], "packages": found})


@router.get("/v1/models")
async def models(state: State) -> Response:
    """Every name that requests may use."""
    cards = [_card(model, name) for model in state.pool.models for name in model.source.names]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def one_model(name: str, state: State) -> Response:
    """One of them."""
    return JSONResponse(_card(state.pool.find(name), name))


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    length = model.resolution.config.max_model_len
    if model.ready and model.loop is not None:
        length = model.loop.loaded.result().engine.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "modelbay",
        "root": model.source.reference,
        "parent": None,
        "max_model_len": length,
        "task": model.resolution.task,
        "loaded": model.ready,
    }


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Measurements, for Prometheus."""
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/modelbay/explain")
async def explain(state: State, model: str | None = None) -> Response:
    """What is being served and why: resolution, commits, plugins, and the trace of every decision."""
    served = state.pool.find(model)
    resolution = served.resolution
    if served.ready and served.loop is not None:
        resolution = served.loop.loaded.result().resolution
    files, args = resolution.files, resolution.args
    return JSONResponse(
        {
            "model": served.name,
            "names": list(served.source.names),
            "reference": served.source.reference,
            "loaded": served.ready,
            "resolution": {
                "task": resolution.task,
                "architecture": resolution.architecture,
                "served_by": resolution.arch.name if resolution.arch else None,
                "owner": str(resolution.owner) if resolution.owner else None,
                "backend": resolution.backend,
                "source": files.kind,
                "repository": files.repo_id,
                "revision": files.revision,
                "commit": files.commit,
                "code_revision": args.code_revision,
                "tokenizer": args.tokenizer,
                "tokenizer_revision": args.tokenizer_revision,
            },
            "plugins": resolution.plugins.manifest(),
            "trace": resolution.trace.to_list(),
        }
    )
