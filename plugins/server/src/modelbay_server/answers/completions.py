"""Answers of /v1/completions, whole and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from modelbay_server.answers.common import Sent, new_id, now, usage
from modelbay_server.answers.logprobs import completion_logprobs, prompt_logprobs
from modelbay_server.answers.offsets import Offsets
from modelbay_server.answers.size import Entries
from modelbay_server.job import Job
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.completions import CompletionBody
from modelbay_server.streaming import Beside, made
from modelbay_server.texts import decode


class CompletionAnswer:
    """One request's answer: choices are numbered prompt by prompt, n for each."""

    def __init__(self, body: CompletionBody, model: LoadedModel) -> None:
        self.body = body
        self.entries = Entries.of(body)
        self._model = model
        self._head = {
            "id": new_id("cmpl", body.request_id),
            "object": "text_completion",
            "created": now(),
            "model": model.name,
        }

    def whole(self, outputs: list[Any]) -> dict[str, Any]:
        outputs = [self._cut(output) for output in outputs]
        choices = []
        for index, output in enumerate(outputs):
            prompt = _Prompt(self, output)
            choices += [self._choice(index, prompt, sequence) for sequence in output.outputs]
        return {**self._head, "choices": choices, "usage": usage(outputs)}

    def _choice(self, prompt_index: int, prompt: _Prompt, sequence: Any) -> dict[str, Any]:
        body = self.body
        choice = {
            "index": prompt_index * (body.n or 1) + sequence.index,
            "text": prompt.echo + sequence.text,
            "logprobs": self.logprobs(prompt, sequence.token_ids, sequence.logprobs, self.offsets()),
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt.logprobs
        if body.return_token_ids:
            choice |= {"prompt_token_ids": prompt.token_ids, "token_ids": list(sequence.token_ids)}
        return choice

    def _cut(self, output: Any) -> Any:
        """The output; of a request for the prompt alone without the token that the engine generates at least."""
        if not self.body.only_echo:
            return output
        cut = [
            replace(sequence, text="", token_ids=[], logprobs=None if sequence.logprobs is None else [])
            for sequence in output.outputs
        ]
        return replace(output, outputs=cut)

    def logprobs(
        self, prompt: _Prompt | None, token_ids: list[int], logprobs: list[Any] | None, offsets: Offsets | None
    ) -> dict[str, Any] | None:
        """Of tokens of the output; and of the prompt's before them, where ``prompt`` is echoed with them."""
        if self.body.logprobs is None or logprobs is None or offsets is None:
            return None
        if prompt is not None:
            offsets.skip(len(prompt.echo))
        shown = completion_logprobs(token_ids, logprobs, self.body.logprobs, offsets.of_output(token_ids))
        if prompt is None or prompt.echoed is None:
            return shown
        return {key: [*prompt.echoed[key], *values] for key, values in shown.items()}

    def offsets(self) -> Offsets | None:
        """For the tokens of one choice, if they are shown."""
        if self.body.logprobs is None:
            return None
        tokenizer = self._model.tokenizer
        special = () if tokenizer is None else tokenizer.all_special_ids
        skip = self.body.skip_special_tokens is not False
        return Offsets(self._model.llm.engine.detokenizer, special, skip_special=skip)

    def text_of(self, token_ids: list[int]) -> str:
        return decode(self._model, token_ids)

    async def pieces(self, job: Job, beside: Beside) -> AsyncIterator[Any]:
        """Chunks, each with the one choice that grew, and at the end the usage if it was asked for."""
        n, options = self.body.n or 1, self.body.stream_options
        streams = [[_ChoiceStream(self, index * n + number) for number in range(n)] for index in range(job.size)]
        latest: dict[int, Any] = {}
        async for fresh in job.updates():
            begun = set(latest)
            latest |= {index: self._cut(output) for index, output in fresh.items()}
            running = usage(latest.values()) if options and options.continuous_usage_stats else None
            for index in fresh:
                if index not in begun:
                    prompt = _Prompt(self, latest[index])
                    for stream in streams[index]:
                        stream.prompt = prompt
                for stream, sequence in zip(streams[index], latest[index].outputs, strict=True):
                    piece = await made(stream.weight(sequence), partial(self._chunk, stream, sequence, running), beside)
                    if piece is not None:
                        yield piece
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": usage(latest.values())}

    def _chunk(self, stream: _ChoiceStream, sequence: Any, running: dict[str, Any] | None) -> dict[str, Any] | None:
        choice = stream.piece(sequence)
        return None if choice is None else {**self._head, "choices": [choice], "usage": running}


class _Prompt:
    """What the choices of one prompt have in common: made once, and only if it is shown."""

    def __init__(self, answer: CompletionAnswer, output: Any) -> None:
        self._answer = answer
        self._output = output

    @cached_property
    def token_ids(self) -> list[int]:
        return list(self._output.prompt_token_ids)

    @cached_property
    def text(self) -> str:
        given: str | None = self._output.prompt
        return given if given is not None else self._answer.text_of(self.token_ids)

    @property
    def echo(self) -> str:
        """What choices begin with."""
        return self.text if self._answer.body.echo else ""

    @cached_property
    def logprobs(self) -> Sequence[dict[str, Any] | None] | None:
        return prompt_logprobs(self._output.prompt_logprobs)

    @cached_property
    def echoed(self) -> dict[str, list[Any]] | None:
        """Log-probabilities of what is echoed, in the form that those of the output have."""
        body, positions, offsets = self._answer.body, self._output.prompt_logprobs, self._answer.offsets()
        if not body.echo or body.logprobs is None or positions is None or offsets is None:
            return None
        first = self._answer.text_of(self.token_ids[:1])
        places = offsets.of_prompt(self.token_ids, self.text)
        return completion_logprobs(self.token_ids, positions, body.logprobs, places, first)


class _ChoiceStream:
    """One choice of a streamed answer.

    Attributes:
        prompt: set when the first output comes; None once the first piece has been made of it.
    """

    def __init__(self, answer: CompletionAnswer, index: int) -> None:
        self.prompt: _Prompt | None = None
        self._answer = answer
        self._index = index
        self._sent = Sent()
        self._offsets = answer.offsets()

    def weight(self, sequence: Any) -> int:
        """Entries of the next piece."""
        entries = self._answer.entries
        prompt = 0 if self.prompt is None else len(self.prompt.token_ids) * entries.prompt
        return prompt + (len(sequence.token_ids) - self._sent.tokens) * entries.output

    def piece(self, sequence: Any) -> dict[str, Any] | None:
        """The choice with what is new in it; None while a client would see nothing."""
        body, prompt, news = self._answer.body, self.prompt, self._sent.news(sequence)
        echo = "" if prompt is None else prompt.echo
        if not news.shows(ids=body.return_token_ids) and news.finish_reason is None and not echo:
            return None
        self.prompt = None
        choice = {
            "index": self._index,
            "text": echo + news.text,
            "logprobs": self._answer.logprobs(prompt, news.token_ids, news.logprobs, self._offsets),
            "finish_reason": news.finish_reason,
            "stop_reason": news.stop_reason if news.finish_reason is not None else None,
        }
        if body.return_token_ids:
            choice |= {"prompt_token_ids": None if prompt is None else prompt.token_ids, "token_ids": news.token_ids}
        return choice
