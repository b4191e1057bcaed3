"""What comes back from a request. Names as in vLLM; plain data, picklable, and `to_dict` for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability at one position.

    Args:
        logprob: log-softmax of the model's raw logits, before any sampling parameter.
        rank: 1 for the likeliest token; one more than the number of tokens that are likelier.
        decoded_token: the token's own text, where there is a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities asked for at one position, as numbers: the k likeliest tokens, likeliest first, and the
    token that stands there (chosen, or given in the prompt)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()

    def to_dict(self, token_text: Callable[[int], str] | None = None) -> dict[int, Logprob]:
        """Token id -> `Logprob`: the token itself first, then the k likeliest.

        Args:
            token_text: gives the text of one token (`Detokenizer.token_text`).
        """

        def text(token_id: int) -> str | None:
            return token_text(token_id) if token_text is not None else None

        entries = {self.token_id: Logprob(self.logprob, self.rank, text(self.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(self.top_ids, self.top_logprobs, strict=True), start=1):
            if token_id != self.token_id:
                entries[token_id] = Logprob(logprob, rank, text(token_id))
        return entries


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic`, what the prefix cache saved, and, with speculative
    decoding, how many tokens were guessed and how many of those were right."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Of the tokens that were guessed, the share that was right."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    def to_dict(self) -> dict[str, Any]:
        """Durations and counts: the clock's own zero means nothing to a reader."""
        total = None if self.finished_time is None else self.finished_time - self.arrival_time
        queued = None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time
        return {
            "queued_s": queued,
            "time_to_first_token_s": self.time_to_first_token,
            "total_s": total,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
        }


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Args:
        index: which of the request's n sequences.
        text: the text so far; "" when the request asked for no text.
        token_ids: the output tokens, with the stop token if one ended it.
        cumulative_logprob: sum of the chosen tokens' log-probabilities, if those were asked for.
        logprobs: one entry per output token, if asked for.
        finish_reason: None while running; "stop" (end-of-sequence, stop token, stop string, structured output that is
            complete), "length", "abort", "error" (structured output that cannot be completed).
        stop_reason: the stop string or stop token id that ended it; None for the model's own end-of-sequence token;
            after "error" what was wrong.
    """

    index: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; log-probabilities of minus infinity become null."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "cumulative_logprob": _json_number(self.cumulative_logprob),
            "logprobs": _json_logprobs(self.logprobs),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


@dataclass(slots=True)
class RequestOutput:
    """A generation request and its n sequences.

    Args:
        request_id: the request's name.
        prompt: the prompt's text, if it came as text.
        prompt_token_ids: the prompt as the model saw it.
        prompt_logprobs: one entry per prompt token (None for the first, which nothing predicts), if asked for.
        outputs: the sequences, by index.
        metrics: when things happened.
        finished: whether all sequences are.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    finished: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON; log-probabilities of minus infinity become null."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "prompt_logprobs": _json_logprobs(self.prompt_logprobs),
            "outputs": [output.to_dict() for output in self.outputs],
            "metrics": None if self.metrics is None else self.metrics.to_dict(),
            "finished": self.finished,
        }


@dataclass(slots=True)
class HiddenStatesOutput:
    """A prompt's last hidden states, one row per token.

    Args:
        hidden_states: a tensor [T, H] on CPU, float32.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    hidden_states: torch.Tensor
    metrics: RequestMetrics | None = None
    finished: bool = True


@dataclass(slots=True)
class _PooledOutput:
    """What the outputs of pooling begin with; each has a value of its own after it, and then how the request went."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]

    @property
    def outputs(self) -> Self:
        """Itself, so that ``output.outputs.embedding`` (``.probs``, ``.score``), as vLLM has it, works too."""
        return self

    def _to_dict(self, metrics: RequestMetrics | None, finished: bool, **own: Any) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            **own,
            "metrics": None if metrics is None else metrics.to_dict(),
            "finished": finished,
        }


@dataclass(slots=True)
class EmbeddingOutput(_PooledOutput):
    """One prompt's embedding, a list of floats of the model's embedding size (or of the dimensions asked for)."""

    embedding: list[float]
    metrics: RequestMetrics | None = None
    finished: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._to_dict(self.metrics, self.finished, embedding=self.embedding)


@dataclass(slots=True)
class ClassificationOutput(_PooledOutput):
    """One prompt's probabilities: a number for each of the model's labels, in their order."""

    probs: list[float]
    metrics: RequestMetrics | None = None
    finished: bool = True

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._to_dict(self.metrics, self.finished, probs=self.probs, num_classes=self.num_classes)


@dataclass(slots=True)
class ScoringOutput(_PooledOutput):
    """How well a document answers a query: a cross-encoder's score of the pair, or the cosine of two embeddings.

    ``prompt`` is the query; ``prompt_token_ids`` are the pair's.
    """

    score: float
    metrics: RequestMetrics | None = None
    finished: bool = True

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._to_dict(self.metrics, self.finished, score=self.score)


PoolingOutput = HiddenStatesOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _json_logprobs(positions: Sequence[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    if positions is None:
        return None
    return [None if position is None else _json_position(position) for position in positions]


def _json_position(position: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _json_number(entry.logprob), "rank": entry.rank, "token": entry.decoded_token}
        for token_id, entry in position.items()
    }
