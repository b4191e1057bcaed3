"""Pooling requests of one HTTP request: built by the runtime's own functions, run in the engine's batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from modelbay_server.engine_loop import Item
from modelbay_server.models import LoadedModel, ServedModel
from modelbay_server.state import ServerState

#: Prompts and their parameters, one for each.
Given = tuple[Sequence[Any], Sequence[Any]]


async def pool(
    served: ServedModel, state: ServerState, length: int, prepare: Callable[[LoadedModel], Given]
) -> list[Any]:
    """The outputs for what ``prepare`` makes of the model, in order.

    Args:
        length: characters that ``prepare`` encodes.
    """
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(state.model(served))
        prompts, params = await state.with_text(length, lambda: prepare(model))
        # Longest first: sequences of one length are computed together.
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place].token_ids))
        items = [Item(prompts[place], params[place]) for place in order]
        job = stack.enter_context(model.loop.submit(items, stream=False))
        await job.admitted()
        outputs = dict(zip(order, await job.results(), strict=True))
    return [outputs[place] for place in range(len(prompts))]


async def score(
    served: ServedModel, state: ServerState, queries: Sequence[str], documents: Sequence[str], params: Any
) -> list[Any]:
    """How well each document fits the query of the same place: by a cross-encoder, or the cosine of embeddings."""
    from modelbay_runtime.pooling import calls

    length = sum(map(len, queries)) + sum(map(len, documents))
    if served.resolution.task == "classify":

        def pairs(model: LoadedModel) -> Given:
            before = calls.query_prompt(model.llm, None, None)
            return calls.score_prompts(model.llm, list(queries), list(documents), params, before)

        return await pool(served, state, length, pairs)
    places: list[tuple[int, int]] = []

    def prepare(model: LoadedModel) -> Given:
        given, found = calls.bi_encoder_prompts(model.llm, list(queries), list(documents), params)
        places.extend(found)
        return given

    outputs = await pool(served, state, length, prepare)
    return await state.beside(lambda: calls.cosines(outputs, places))
