"""How large an answer may become, decided before anything is computed for it.

Its size is counted in entries: a log-probability, a token id, or an echoed token. Each takes some hundred bytes on its
way from the engine to the client. A few words of a request can ask for billions of them, since a prompt's are repeated
in every choice, so there is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelbay.errors import UsageError
from modelbay_runtime.engine.prompts import Prompt, fit_prompt
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.models import LoadedModel
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.schemas.completions import CompletionBody


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries for each token of the prompt and of the output, in each choice."""

    prompt: int
    output: int

    @classmethod
    def of(cls, body: ChatBody | CompletionBody) -> Entries:
        chosen = _logprobs(body)
        ids = int(body.return_token_ids)
        echo = isinstance(body, CompletionBody) and bool(body.echo)
        prompt = ids + (0 if body.prompt_logprobs is None else body.prompt_logprobs + 1)
        return cls(prompt + (1 + chosen if echo else 0), ids + chosen)

    def in_answer(self, outputs: Sequence[Any]) -> int:
        """How much there is to write in the answer that these outputs make; text alone is quickly written."""
        return sum(
            len(output.outputs) * len(output.prompt_token_ids) * self.prompt
            + sum(len(sequence.token_ids) * self.output + len(sequence.text) // 64 for sequence in output.outputs)
            for output in outputs
        )


def _logprobs(body: ChatBody | CompletionBody) -> int:
    """Log-probabilities that are shown with each token of a choice."""
    if isinstance(body, ChatBody):
        return 1 + (body.top_logprobs or 0) if body.logprobs else 0
    return 0 if body.logprobs is None else 1 + body.logprobs


def bounded(
    body: ChatBody | CompletionBody, params: SamplingParams, prompts: Sequence[Prompt], model: LoadedModel, most: int
) -> SamplingParams:
    """``params`` for an answer of at most ``most`` entries. Where neither request nor model limits the output, the
    bound does.

    Raises:
        UsageError: the answer may become larger, with the arithmetic; or a prompt is too long for the model.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise UsageError("prompt_logprobs come with whole answers only, and stream is true.")
    longest, entries = model.llm.engine.max_model_len, Entries.of(body)
    said = params.with_defaults(model.served.resolution.config.generation)
    lengths = [len(fit_prompt(prompt, said, longest)) for prompt in prompts]
    count = _Count(said.n, lengths, entries)
    room = [longest - length for length in lengths]
    if said.max_tokens is None and entries.output:
        fits = count.fitting(most)
        if 0 < fits < max(room) and fits >= said.min_tokens:
            return params.replace(max_tokens=fits)
    nothing = isinstance(body, CompletionBody) and body.only_echo
    output = 0 if nothing else sum(min(said.max_tokens or left, left) for left in room)
    count.check(output, most)
    return params


@dataclass(frozen=True, slots=True)
class _Count:
    n: int
    lengths: list[int]
    entries: Entries

    def fitting(self, most: int) -> int:
        """Output tokens of each sequence that fit, where each of them has entries."""
        left = most - self.n * sum(self.lengths) * self.entries.prompt
        return left // (self.n * len(self.lengths) * self.entries.output)

    def check(self, output: int, most: int) -> None:
        """``output``: tokens of one sequence of each prompt, together."""
        given = sum(self.lengths)
        total = self.n * (given * self.entries.prompt + output * self.entries.output)
        if total > most:
            raise UsageError(
                f"the answer may hold {total:,} log-probabilities and token ids, and {most:,} are the most of one: "
                f"n = {self.n}, times ({given:,} tokens of prompts x {self.entries.prompt} each + up to {output:,} "
                f"tokens of output x {self.entries.output} each).",
                hint="Ask for fewer of them, or raise --max-answer-entries of the server.",
            )
