"""What several requests have in common: strict types, no unknown fields, and how a text is to be sampled."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    WithJsonSchema,
    model_validator,
)

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams

#: Sequences that one prompt may become.
MAX_N = 128
#: Prompts, and sequences of all of them, in one HTTP request.
MAX_PROMPTS = 2048
MAX_STOPS = 64
MAX_IDS = 4096
#: Characters of all bad_words together: an automaton of their tokens is held while the request runs.
MAX_BAD_WORDS = 2**17

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], FailFast()]


class Fields(BaseModel):
    """An object in a request. A field that is null is one that was not sent: there are clients that send all they know
    of."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict) and any(value is None for value in given.values()):
            return {name: value for name, value in given.items() if value is not None}
        return given


class Body(Fields):
    """A request. ``model`` is one of the names of GET /v1/models; without it the first model answers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    model: str | None = None
    user: str | None = Field(None, description="Accepted, and without effect.")
    request_id: Annotated[str, Field(max_length=200)] | None = Field(None, description="Stands in the answer's id.")


class StreamOptions(Fields):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(False, description="Accepted, and without effect.")


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list. Checked by hand: one message instead of one per item."""
    items = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(items, list) or not items:
        raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids, not empty")
    if len(items) > MAX_PROMPTS:
        raise ValueError(f"holds {len(items)} prompts, and {MAX_PROMPTS} are the most of one request")
    for item in items:
        if not isinstance(item, str) and not _is_ids(item):
            raise ValueError("must hold texts or lists of token ids (integers of at least 0), none of them empty")
    return items


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def _bounded(words: list[str]) -> list[str]:
    length = sum(map(len, words))
    if length > MAX_BAD_WORDS:
        raise ValueError(f"hold {length:,} characters, and {MAX_BAD_WORDS:,} are the most of one request")
    return words


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    Any,
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
            ]
        }
    ),
]


class SamplingBody(Body):
    """How tokens are chosen; names as in OpenAI's API and, beyond it, vLLM's. What is not said is the model's own."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_IDS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = Field(None, description="Accepted, and without effect.")
    store: bool | None = Field(None, description="Accepted, and without effect.")
    service_tier: str | None = Field(None, description="Accepted, and without effect.")
    safety_identifier: str | None = Field(None, description="Accepted, and without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, and without effect.")

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_IDS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_IDS), AfterValidator(_bounded)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = Field(False, description="Add prompt_token_ids and token_ids to the answer.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice, grammar: what the output must be."
    )

    def sampling(self, **more: Any) -> SamplingParams:
        """The parameters of the engine; ``more`` is what the two kinds of completion say differently.

        Raises:
            UsageError: a value outside its range.
        """
        said = {name: getattr(self, name) for name in _SAMPLING}
        given = {name: value for name, value in {**said, **more}.items() if value is not None or name == "max_tokens"}
        if self.structured_outputs is not None:
            if "structured_outputs" in more:
                raise UsageError("response_format and structured_outputs exclude each other.")
            given["structured_outputs"] = self.structured_outputs
        return SamplingParams(**given)


_SAMPLING = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "bad_words", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens", "prompt_logprobs",
)  # fmt: skip


def check_total(prompts: int, n: int) -> None:
    """Refuse more sequences than one HTTP request may start.

    Raises:
        UsageError: with the number.
    """
    total = prompts * n
    if total > MAX_PROMPTS:
        raise UsageError(f"the request asks for {total} sequences, and {MAX_PROMPTS} are the most of one request.")
