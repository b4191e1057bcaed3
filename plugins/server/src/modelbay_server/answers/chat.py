"""Answers of /v1/chat/completions, whole and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from modelbay_server.answers.common import News, Sent, new_id, now, usage
from modelbay_server.answers.logprobs import chat_logprobs, prompt_logprobs
from modelbay_server.answers.size import Entries
from modelbay_server.answers.tool_calls import ToolReader
from modelbay_server.job import Job
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.streaming import Beside, made

#: Entries of one choice of a chunk, and what makes it.
_Piece = tuple[int, Callable[[], dict[str, Any]]]


class ChatAnswer:
    """One conversation's answer: n choices.

    Args:
        tools: how calls are found in it; None where none are looked for.
    """

    def __init__(self, body: ChatBody, model: LoadedModel, tools: ToolReader | None = None) -> None:
        self.body = body
        self.tools = tools
        self.entries = Entries.of(body)
        self._model = model
        self._head = {
            "id": new_id("chatcmpl", body.request_id),
            "created": now(),
            "model": model.name,
        }

    def whole(self, outputs: list[Any]) -> dict[str, Any]:
        [output] = outputs
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(sequence) for sequence in output.outputs],
            "usage": usage(outputs),
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        return answer

    def _choice(self, sequence: Any) -> dict[str, Any]:
        text: str = sequence.text
        calls: list[dict[str, Any]] = []
        if self.tools is not None:
            text, calls = self.tools.read(self.tools.prefix + text, cut=sequence.finish_reason == "length")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        choice = {
            "index": sequence.index,
            "message": message,
            "logprobs": self.logprobs(sequence.token_ids, sequence.logprobs),
            "finish_reason": "tool_calls" if calls and sequence.finish_reason == "stop" else sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(sequence.token_ids)
        return choice

    def logprobs(self, token_ids: list[int], logprobs: list[Any] | None) -> dict[str, Any] | None:
        if not self.body.logprobs or logprobs is None:
            return None
        return chat_logprobs(
            token_ids, logprobs, self.body.top_logprobs or 0, self._model.llm.engine.detokenizer.own_bytes
        )

    async def pieces(self, job: Job, beside: Beside) -> AsyncIterator[Any]:
        """Chunks: for each choice its role, its text as it grows, the reason it ended; then the usage if asked for."""
        options = self.body.stream_options
        streams = [_ChoiceStream(self, index) for index in range(self.body.n or 1)]
        output: Any = None
        async for fresh in job.updates():
            output = fresh[0]
            running = usage([output]) if options and options.continuous_usage_stats else None
            for stream, sequence in zip(streams, output.outputs, strict=True):
                for weight, make in stream.pieces(output, sequence):
                    yield await made(weight, partial(self._with, make, running), beside)
        if options is not None and options.include_usage:
            yield self._chunk([], usage([output]))

    def _with(self, make: Callable[[], dict[str, Any]], running: dict[str, Any] | None) -> dict[str, Any]:
        return self._chunk([make()], running)

    def _chunk(self, choices: list[dict[str, Any]], counted: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, "usage": counted}


class _ChoiceStream:
    """One choice of a streamed answer."""

    def __init__(self, answer: ChatAnswer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._sent = Sent()
        self._calls = answer.tools.stream() if answer.tools is not None else None

    def pieces(self, output: Any, sequence: Any) -> Iterator[_Piece]:
        """What is new, as pieces that are made when they are sent, each with its number of entries."""
        entries, ids = self._answer.entries, self._answer.body.return_token_ids
        if not self._sent.begun:
            self._sent.begun = True
            yield len(output.prompt_token_ids) * entries.prompt, partial(self._begin, output)
        news = self._sent.news(sequence)
        text = news.text if self._calls is None else self._calls.text(news.text)
        if replace(news, text=text).shows(ids=ids):
            yield len(news.token_ids) * entries.output, partial(self._piece, {"content": text}, news)
        if news.finish_reason is not None:
            for choice in self._end(news):
                yield 0, partial(dict, choice)

    def _begin(self, output: Any) -> dict[str, Any]:
        tools = self._answer.tools
        choice = self._shape({"role": "assistant", "content": None if tools and tools.forced else ""})
        if self._answer.body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def _piece(self, delta: dict[str, Any], news: News) -> dict[str, Any]:
        choice = self._shape(delta)
        choice["logprobs"] = self._answer.logprobs(news.token_ids, news.logprobs)
        if self._answer.body.return_token_ids:
            choice["token_ids"] = list(news.token_ids)
        return choice

    def _end(self, news: News) -> Iterator[dict[str, Any]]:
        reason = news.finish_reason
        if self._calls is not None:
            text, calls = self._calls.finish(cut=reason == "length")
            if text:
                yield self._shape({"content": text})
            for number, call in enumerate(calls):
                yield self._shape({"tool_calls": [{"index": number, **call}]})
            if calls and reason == "stop":
                reason = "tool_calls"
        yield {**self._shape({}), "finish_reason": reason, "stop_reason": news.stop_reason}

    def _shape(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
