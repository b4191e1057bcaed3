"""POST /v1/completions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelbay_server.answers.completions import CompletionAnswer
from modelbay_server.bodies import JsonRoute
from modelbay_server.generated import generate
from modelbay_server.models import ServedModel
from modelbay_server.schemas.completions import CompletionBody
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import until_disconnect
from modelbay_server.texts import read_prompts

router = APIRouter(route_class=JsonRoute, tags=["generate"])


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, state: State) -> Response:
    """Continue one prompt or several: texts, or token ids."""
    served = state.pool.require(body.model, ["generate"], "completion")
    return await until_disconnect(request, _answer(body, served, state))


async def _answer(body: CompletionBody, served: ServedModel, state: ServerState) -> Response:
    params = body.params()
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(state.model(served))
        length = sum(len(prompt) for prompt in body.prompt)
        read = partial(read_prompts, model, body.prompt, params, add_special_tokens=body.add_special_tokens)
        prompts = await state.with_text(length, read)
        return await generate(body, params, prompts, model, state, stack, lambda: CompletionAnswer(body, model))
