"""POST /rerank and /score, under each of the paths that clients know them by."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import PoolingParams
from modelbay_server.answers.common import new_id, now, pooling_usage
from modelbay_server.bodies import JsonRoute
from modelbay_server.models import ServedModel
from modelbay_server.pooled import score
from modelbay_server.schemas.common import MAX_PROMPTS
from modelbay_server.schemas.pooling import RerankBody, ScoreBody
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import until_disconnect

router = APIRouter(route_class=JsonRoute, tags=["pooling"])

_TASKS = ("classify", "embed")


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankBody, request: Request, state: State) -> Response:
    """Documents, the one that fits the query best first."""
    served = state.pool.require(body.model, _TASKS, "reranking")
    return await until_disconnect(request, _rerank(body, served, state))


async def _rerank(body: RerankBody, served: ServedModel, state: ServerState) -> Response:
    texts = [_text(document, index) for index, document in enumerate(body.documents)]
    params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    outputs = await score(served, state, [body.query] * len(texts), texts, params)
    best = sorted(range(len(texts)), key=lambda index: -outputs[index].score)[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": outputs[index].score} for index in best]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return JSONResponse(
        {
            "id": new_id("rerank", body.request_id),
            "model": served.name,
            "results": results,
            "usage": pooling_usage(outputs),
        }
    )


def _text(document: Any, index: int) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str) or not text:
        raise UsageError(f'documents.{index} must be a text, or an object with a "text".')
    return text


@router.post("/score")
@router.post("/v1/score")
async def scores(body: ScoreBody, request: Request, state: State) -> Response:
    """How well texts fit, pair by pair."""
    served = state.pool.require(body.model, _TASKS, "scoring")
    return await until_disconnect(request, _score(body, served, state))


async def _score(body: ScoreBody, served: ServedModel, state: ServerState) -> Response:
    left, right = _paired(body)
    params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
    outputs = await score(served, state, left, right, params)
    data = [{"object": "score", "index": index, "score": output.score} for index, output in enumerate(outputs)]
    return JSONResponse(
        {
            "id": new_id("score", body.request_id),
            "object": "list",
            "created": now(),
            "model": served.name,
            "data": data,
            "usage": pooling_usage(outputs),
        }
    )


def _paired(body: ScoreBody) -> tuple[list[str], list[str]]:
    """Raises UsageError: numbers that do not fit."""
    left = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    right = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise UsageError(f"text_1 has {len(left)} texts and text_2 {len(right)}: give one, or as many of each.")
    assert len(left) <= MAX_PROMPTS
    return left, right
