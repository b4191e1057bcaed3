"""Answers of /v1/chat/completions, whole and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from modelbay_server.answers.common import News, Sent, new_id, now, usage
from modelbay_server.answers.logprobs import chat_logprobs, prompt_logprobs
from modelbay_server.answers.tool_calls import ToolReader
from modelbay_server.job import Job
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.chat import ChatBody


class ChatAnswer:
    """One conversation's answer: n choices.

    Args:
        tools: how calls are found in it; None where none are looked for.
    """

    def __init__(self, body: ChatBody, model: LoadedModel, tools: ToolReader | None = None) -> None:
        self._body = body
        self._tools = tools
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
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        return answer

    def _choice(self, sequence: Any) -> dict[str, Any]:
        text: str = sequence.text
        calls: list[dict[str, Any]] = []
        if self._tools is not None:
            text, calls = self._tools.read(self._tools.prefix + text, cut=sequence.finish_reason == "length")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        choice = {
            "index": sequence.index,
            "message": message,
            "logprobs": self._logprobs(sequence.token_ids, sequence.logprobs),
            "finish_reason": "tool_calls" if calls and sequence.finish_reason == "stop" else sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(sequence.token_ids)
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[Any] | None) -> dict[str, Any] | None:
        if not self._body.logprobs or logprobs is None:
            return None
        return chat_logprobs(token_ids, logprobs, self._body.top_logprobs or 0)

    async def pieces(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Chunks: for each choice its role, its text as it grows, the reason it ended; then the usage if asked for."""
        options = self._body.stream_options
        streams = [_ChoiceStream(self, index) for index in range(self._body.n or 1)]
        output: Any = None
        async for fresh in job.updates():
            output = fresh[0]
            for stream, sequence in zip(streams, output.outputs, strict=True):
                for choice in stream.pieces(output, sequence):
                    running = usage([output]) if options and options.continuous_usage_stats else None
                    yield self._chunk([choice], running)
        if options is not None and options.include_usage:
            yield self._chunk([], usage([output]))

    def _chunk(self, choices: list[dict[str, Any]], counted: dict[str, Any] | None) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, "usage": counted}


class _ChoiceStream:
    """One choice of a streamed answer."""

    def __init__(self, answer: ChatAnswer, index: int) -> None:
        self._answer = answer
        self._index = index
        self._sent = Sent()
        self._calls = answer._tools.stream() if answer._tools is not None else None

    def pieces(self, output: Any, sequence: Any) -> Iterator[dict[str, Any]]:
        first = not self._sent.begun
        news = self._sent.news(sequence)
        if first:
            self._sent.begun = True
            yield self._begin(output)
        text = news.text if self._calls is None else self._calls.text(news.text)
        if text or news.logprobs:
            yield self._piece({"content": text}, news)
        if news.finish_reason is not None:
            yield from self._end(news)

    def _begin(self, output: Any) -> dict[str, Any]:
        tools = self._answer._tools
        choice = self._shape({"role": "assistant", "content": None if tools and tools.forced else ""})
        if self._answer._body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
        return choice

    def _piece(self, delta: dict[str, Any], news: News) -> dict[str, Any]:
        choice = self._shape(delta)
        choice["logprobs"] = self._answer._logprobs(news.token_ids, news.logprobs)
        if self._answer._body.return_token_ids:
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
