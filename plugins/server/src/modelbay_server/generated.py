"""Generating requests of one HTTP request: bounded, prepared beside the event loop, run in the engine's batches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response

from modelbay_runtime.engine.prompts import Prompt
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.answers.size import Entries, bounded
from modelbay_server.engine_loop import Item
from modelbay_server.job import Job
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.schemas.completions import CompletionBody
from modelbay_server.state import ServerState
from modelbay_server.streaming import Beside, EventStream, json_answer
from modelbay_server.texts import prepare


class Answer(Protocol):
    """What the outputs are shown as."""

    entries: Entries

    def whole(self, outputs: list[Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed, from an output for each prompt."""

    def pieces(self, job: Job, beside: Beside) -> AsyncIterator[Any]:
        """The chunks of a stream."""


async def generate(
    body: ChatBody | CompletionBody,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    model: LoadedModel,
    state: ServerState,
    stack: AsyncExitStack,
    begin: Callable[[], Answer],
) -> Response:
    """The response to a request with these prompts.

    Args:
        stack: holds the model; what is taken here is entered too, and given back when it closes. A stream takes it
            along.
        begin: makes the answer, once the engine has taken the request.

    Raises:
        UsageError: the request cannot be served, or its answer would be too large.
    """
    held = None
    if params.structured_outputs is not None or params.bad_words:
        held = await state.beside(partial(prepare, model, params))
    params = bounded(body, params, prompts, model, state.settings.max_answer_entries)
    job = stack.enter_context(model.loop.submit([Item(prompt, params) for prompt in prompts], stream=bool(body.stream)))
    await job.admitted()
    del held
    answer = begin()
    if body.stream:
        return EventStream(answer.pieces(job, state.answering), stack.pop_all())
    outputs = await job.results()
    return await json_answer(answer.entries.in_answer(outputs), partial(answer.whole, outputs), state.answering)
