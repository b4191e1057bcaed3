"""Answers of /v1/completions, whole and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from modelbay_server.answers.common import Sent, new_id, now, usage
from modelbay_server.answers.logprobs import completion_logprobs, prompt_logprobs
from modelbay_server.job import Job
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.completions import CompletionBody
from modelbay_server.texts import decode


class CompletionAnswer:
    """One request's answer: choices are numbered prompt by prompt, n for each."""

    def __init__(self, body: CompletionBody, model: LoadedModel) -> None:
        self._body = body
        self._model = model
        self._head = {
            "id": new_id("cmpl", body.request_id),
            "object": "text_completion",
            "created": now(),
            "model": model.name,
        }

    def whole(self, outputs: list[Any]) -> dict[str, Any]:
        if self._body.only_echo:
            outputs = [_without_output(output) for output in outputs]
        choices = [
            self._choice(index, output, sequence) for index, output in enumerate(outputs) for sequence in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage(outputs)}

    def _choice(self, prompt_index: int, output: Any, sequence: Any) -> dict[str, Any]:
        body = self._body
        echo = self._prompt_text(output) if body.echo else ""
        choice = {
            "index": prompt_index * (body.n or 1) + sequence.index,
            "text": echo + sequence.text,
            "logprobs": self._logprobs(output, sequence.token_ids, sequence.logprobs, with_prompt=bool(body.echo)),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": list(sequence.token_ids)}
        return choice

    def _logprobs(
        self, output: Any, token_ids: list[int], logprobs: list[Any] | None, *, with_prompt: bool, offset: int = 0
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None or logprobs is None:
            return None
        ids, positions, first = list(token_ids), list(logprobs), ""
        if with_prompt and output.prompt_logprobs is not None:
            ids, positions = [*output.prompt_token_ids, *ids], [*output.prompt_logprobs, *positions]
            first = decode(self._model, ids[:1])
            if not self._prompt_text(output).startswith(first):
                offset -= len(first)  # a BOS that the tokenizer put before the text
        return completion_logprobs(ids, positions, self._body.logprobs, offset, first)

    def _prompt_text(self, output: Any) -> str:
        return output.prompt if output.prompt is not None else decode(self._model, output.prompt_token_ids)

    async def pieces(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Chunks, each with the one choice that grew, and at the end the usage if it was asked for."""
        n, options = self._body.n or 1, self._body.stream_options
        sent = [Sent() for _ in range(job.size * n)]
        latest: dict[int, Any] = {}
        async for fresh in job.updates():
            latest |= fresh
            for index, output in fresh.items():
                if self._body.only_echo:
                    output = _without_output(output)
                for sequence in output.outputs:
                    choice_index = index * n + sequence.index
                    choice = self._piece(choice_index, output, sequence, sent[choice_index])
                    if choice is not None:
                        running = usage(latest.values()) if options and options.continuous_usage_stats else None
                        yield {**self._head, "choices": [choice], "usage": running}
        if options is not None and options.include_usage:
            finished = [_without_output(each) if self._body.only_echo else each for each in latest.values()]
            yield {**self._head, "choices": [], "usage": usage(finished)}

    def _piece(self, choice_index: int, output: Any, sequence: Any, sent: Sent) -> dict[str, Any] | None:
        first = not sent.begun
        echo = self._prompt_text(output) if first and self._body.echo else ""
        news = sent.news(sequence)
        if not news.shows and news.finish_reason is None and not echo:
            return None
        sent.begun = True
        with_prompt = bool(first and self._body.echo)
        shown = self._logprobs(output, news.token_ids, news.logprobs, with_prompt=with_prompt, offset=sent.offset)
        if shown is not None and shown["tokens"]:
            sent.offset = shown["text_offset"][-1] + len(shown["tokens"][-1])
        choice = {
            "index": choice_index,
            "text": echo + news.text,
            "logprobs": shown,
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason if news.finish_reason is not None else None,
        }
        if self._body.return_token_ids:
            choice |= {"prompt_token_ids": list(output.prompt_token_ids) if first else None}
            choice |= {"token_ids": list(news.token_ids)}
        return choice


def _without_output(output: Any) -> Any:
    """The output of a request for the prompt alone: the engine generates at least one token."""
    from dataclasses import replace

    cut = [
        replace(sequence, text="", token_ids=[], logprobs=None if sequence.logprobs is None else [])
        for sequence in output.outputs
    ]
    return replace(output, outputs=cut)
