"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelbay_server.answers.common import new_id, now, pooling_usage
from modelbay_server.bodies import JsonRoute
from modelbay_server.models import LoadedModel, ServedModel
from modelbay_server.pooled import Given, pool
from modelbay_server.schemas.pooling import EmbeddingBody
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import json_answer, until_disconnect

router = APIRouter(route_class=JsonRoute, tags=["pooling"])


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request, state: State) -> Response:
    """A vector for each text, or each list of token ids."""
    served = state.pool.require(body.model, ["embed"], "embedding")
    return await until_disconnect(request, _answer(body, served, state))


async def _answer(body: EmbeddingBody, served: ServedModel, state: ServerState) -> Response:
    from modelbay_runtime.pooling.calls import embed_prompts

    params = body.params()
    given = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in body.input]

    def prepare(model: LoadedModel) -> Given:
        return embed_prompts(model.llm, given, params, prompt_name=body.prompt_name, prompt=None)

    outputs = await pool(served, state, sum(len(text) for text in body.input), prepare)

    def answer() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(output.embedding, body.encoding_format)}
            for index, output in enumerate(outputs)
        ]
        return {
            "id": new_id("embd", body.request_id),
            "object": "list",
            "created": now(),
            "model": served.name,
            "data": data,
            "usage": pooling_usage(outputs),
        }

    return await json_answer(sum(len(output.embedding) for output in outputs), answer, state.answering)


def _encoded(vector: Sequence[float], encoding: str) -> Any:
    """base64: of little-endian float32, whatever the machine, as OpenAI's clients unpack it."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
