"""Usage, identifiers, and what is new in an output since the one before it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


def new_id(prefix: str, wanted: str | None = None) -> str:
    return f"{prefix}-{wanted or uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def usage(outputs: Iterable[Any]) -> dict[str, Any]:
    """Tokens of the prompts and of everything generated so far."""
    prompt = generated = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        sequences = output.outputs if isinstance(output.outputs, list) else []
        generated += sum(len(sequence.token_ids) for sequence in sequences)
        if output.metrics is not None and len(sequences) == 1:
            # Of several sequences the later ones find the prompt that the first has computed: that tells nothing.
            cached += output.metrics.num_cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def pooling_usage(outputs: Iterable[Any]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": prompt, "total_tokens": prompt}


@dataclass(slots=True)
class Sent:
    """How much of one sequence a client has been sent."""

    text: int = 0
    tokens: int = 0
    finished: bool = False
    begun: bool = False

    def news(self, sequence: Any) -> News:
        """What this output adds, counted as sent from now on: all of it has to reach the client."""
        news = News(
            text=sequence.text[self.text :],
            token_ids=sequence.token_ids[self.tokens :],
            logprobs=None if sequence.logprobs is None else sequence.logprobs[self.tokens :],
            finish_reason=None if self.finished else sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        self.text = len(sequence.text)
        self.tokens = len(sequence.token_ids)
        self.finished = self.finished or sequence.finish_reason is not None
        return news


@dataclass(frozen=True, slots=True)
class News:
    """Text, tokens and log-probabilities that are new; ``finish_reason`` once, with the last of them."""

    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def shows(self, *, ids: bool) -> bool:
        """Whether there is anything that a client can see; ``ids``: it sees token ids."""
        return bool(self.text) or bool(self.logprobs) or (ids and bool(self.token_ids))
