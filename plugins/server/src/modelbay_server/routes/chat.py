"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelbay_server.answers.chat import ChatAnswer
from modelbay_server.bodies import JsonRoute
from modelbay_server.generated import generate
from modelbay_server.models import ServedModel
from modelbay_server.schemas.chat import ChatBody, has_media, plain_messages
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import until_disconnect
from modelbay_server.texts import read_chat, template_text
from modelbay_server.tool_forms import tool_form
from modelbay_server.tool_requests import with_tools

router = APIRouter(route_class=JsonRoute, tags=["generate"])


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation."""
    served = state.pool.require(body.model, ["generate"], "chat")
    return await until_disconnect(request, _answer(body, served, state, len(await request.body())))


async def _answer(body: ChatBody, served: ServedModel, state: ServerState, length: int) -> Response:
    """``length``: characters that the template may make text of, at most: also those of tools, calls and variables."""
    params = body.params(served.resolution.config.generation.get("max_new_tokens"))
    messages = plain_messages(body.messages)
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(state.model(served))
        form = tool_form(state.settings.tool_call_parser, template_text(model))
        forced = length if body.forced_functions is not None else 0  # a grammar is made of them
        tools, params = await state.with_text(forced, partial(with_tools, body, params, form))
        read = partial(
            read_chat,
            model,
            messages,
            tools=body.offered_tools,
            variables=body.variables(),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            params=params,
            prefix=tools.prefix if tools else "",
        )
        prompt = await state.with_text(length, read, media=has_media(messages))
        return await generate(body, params, [prompt], model, state, stack, lambda: ChatAnswer(body, model, tools))
