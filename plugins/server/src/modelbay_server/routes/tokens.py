"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from modelbay.errors import UsageError
from modelbay_runtime.engine.prompts import Prompt
from modelbay_server.answers.json_text import Shaped, json_bytes
from modelbay_server.bodies import JsonRoute
from modelbay_server.models import LoadedModel, ServedModel
from modelbay_server.schemas.chat import has_media, plain_messages, plain_tools
from modelbay_server.schemas.tokens import DetokenizeBody, TokenizeBody
from modelbay_server.state import ServerState, State
from modelbay_server.streaming import until_disconnect
from modelbay_server.texts import decode, read_chat, read_prompts

router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, state: State) -> Response:
    """The token ids of a text, or of a conversation as the model's template renders it."""
    return await until_disconnect(
        request, _tokenize(body, state.pool.find(body.model), state, len(await request.body()))
    )


async def _tokenize(body: TokenizeBody, served: ServedModel, state: ServerState, length: int) -> Response:
    async with state.model(served) as model:
        media = has_media(plain_messages(body.messages or ()))
        return await state.with_text(length, lambda: _tokens(body, model), media=media)


def _tokens(body: TokenizeBody, model: LoadedModel) -> Response:
    ids = _prompt(body, model).token_ids
    # Written run by run: of a long text, one list at once would hold up the event loop from here too.
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.llm.engine.max_model_len}
    answer["tokens"] = Shaped(ids, list)
    if body.return_token_strs:
        answer["token_strs"] = Shaped(ids, model.tokenizer.convert_ids_to_tokens)
    return Response(json_bytes(answer), media_type="application/json")


def _prompt(body: TokenizeBody, model: LoadedModel) -> Prompt:
    if body.prompt is not None:
        return read_prompts(model, [body.prompt], None, add_special_tokens=body.add_special_tokens is not False)[0]
    if body.add_special_tokens:
        raise UsageError("add_special_tokens is for a prompt: a chat template writes its special tokens itself.")
    return read_chat(
        model,
        plain_messages(body.messages or ()),
        tools=plain_tools(body.tools),
        variables=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        params=None,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, state: State) -> Response:
    """The text of token ids."""
    return await until_disconnect(request, _detokenize(body, state.pool.find(body.model), state))


async def _detokenize(body: DetokenizeBody, served: ServedModel, state: ServerState) -> Response:
    async with state.model(served) as model:
        text = await state.with_text(len(body.tokens), lambda: decode(model, body.tokens))
        return JSONResponse({"prompt": text})
