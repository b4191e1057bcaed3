"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from modelbay_server.answers.common import new_id, now, pooling_usage
from modelbay_server.bodies import JsonRoute
from modelbay_server.engine_loop import Item
from modelbay_server.models import ServedModel
from modelbay_server.schemas.pooling import EmbeddingBody
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import until_disconnect
from modelbay_server.texts import read_prompts

router = APIRouter(route_class=JsonRoute, tags=["pooling"])


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request, state: State) -> Response:
    """A vector for each text, or each list of token ids."""
    served = state.pool.require(body.model, ["embed"], "embedding")
    return await until_disconnect(request, _answer(body, served, state))


async def _answer(body: EmbeddingBody, served: ServedModel, state: ServerState) -> Response:
    params = body.params()
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(state.model(served))
        length = sum(len(text) for text in body.input)
        prompts = await state.with_text(length, partial(read_prompts, model, body.input))
        job = stack.enter_context(model.loop.submit([Item(prompt, params) for prompt in prompts], stream=False))
        await job.admitted()
        outputs = await job.results()
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output.embedding, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    return JSONResponse(
        {
            "id": new_id("embd", body.request_id),
            "object": "list",
            "created": now(),
            "model": model.name,
            "data": data,
            "usage": pooling_usage(outputs),
        }
    )


def _encoded(vector: Sequence[float], encoding: str) -> Any:
    """base64: of little-endian float32, whatever the machine, as OpenAI's clients unpack it."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
