"""What a request asks for. Names and defaults as in vLLM; importing this costs neither torch nor transformers.

Both classes check themselves when they are made, so a request that makes no sense is refused before it is queued.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from modelbay.config.generation import SAMPLING_KEYS
from modelbay.errors import ConfigError, UsageError
from modelbay.unserved import SAMPLING_PARAMETERS, refuse_known
from modelbay_runtime.structured.spec import StructuredOutputs, read_structured_outputs

#: The name that vLLM has for it.
StructuredOutputsParams = StructuredOutputs
# Below this temperature the distribution is a point in every float format, so the request is greedy.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_N = 16384  # vLLM's limit: each is a sequence from the moment the request arrives
# The one field where null is a value: no limit but the context.
_NULL_MEANS_NULL = "max_tokens"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    ``None`` for a value that has a default means "not said", as in a JSON request; `max_tokens` alone keeps it, as
    "until the context is full". What was said is kept in `explicit`, since a model's own defaults
    (`with_defaults`) fill only what was not.

    Args:
        n: sequences for one prompt, 16384 at most.
        presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of every token in the output so
            far, once, and once per occurrence.
        repetition_penalty: > 0; logits of tokens in prompt or output are divided (positive) or multiplied (negative).
        temperature: >= 0; 0 is greedy.
        top_p: in (0, 1]; the smallest set of likeliest tokens with at least this probability.
        top_k: the k likeliest tokens (and those that tie with the last of them); 0 and -1 mean all.
        min_p: in [0, 1]; tokens with at least this share of the likeliest token's probability.
        seed: makes the request repeatable whatever else runs; -1 is the same as None.
        stop: strings that end the output; they are not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens.
        bad_words: strings that must not be generated.
        ignore_eos: go on after the model's end-of-sequence tokens.
        max_tokens: most tokens of output; None for as many as fit.
        min_tokens: tokens before which neither a stop token nor a stop string ends the output.
        logprobs: log-probabilities to return with each output token: those of this many likeliest tokens and of
            the chosen one. 0 is the chosen one alone.
        prompt_logprobs: the same for the tokens of the prompt.
        detokenize: whether to make text of the output tokens.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility; the tokenizers of today decide it themselves.
        include_stop_str_in_output: keep the stop string, or the stop token's text, in the text.
        logit_bias: token id to a number in [-100, 100] that is added to its logit.
        truncate_prompt_tokens: keep only this many last tokens of the prompt; -1 for as many as the model takes.
        structured_outputs: what the output must look like (`StructuredOutputs`, or a mapping of its fields): it ends
            only where that is complete, unless a stop string or the length ends it.
            Needs ``modelbay-runtime[structured]``.

    Raises:
        UsageError: a value outside its range, or a name that does not exist.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    explicit = frozenset[str]()
    """Names of the fields that the caller gave a value (not a field itself)."""

    def __new__(cls, **given: Any) -> SamplingParams:
        # Only here can a value that was given be told from a default that happens to equal it.
        _refuse_unknown(cls, given)
        self = super().__new__(cls)
        return self._mark(_said(given))

    def __post_init__(self) -> None:
        _fill_nulls(self)
        _plain_numbers(self)
        set_ = object.__setattr__
        set_(self, "stop", _strings(self.stop, "stop"))
        set_(self, "bad_words", _strings(self.bad_words, "bad_words"))
        set_(self, "stop_token_ids", _token_ids(self.stop_token_ids, "stop_token_ids"))
        set_(self, "logit_bias", _logit_bias(self.logit_bias))
        set_(self, "structured_outputs", read_structured_outputs(self.structured_outputs))
        if self.seed == -1:
            set_(self, "seed", None)
        self._check()

    def _check(self) -> None:
        _check_int("n", self.n, low=1)
        if self.n > MAX_N:
            raise UsageError(f"n must be at most {MAX_N}, got {self.n}.")
        for name, (inside, meaning) in _RANGES.items():
            _check_float(name, getattr(self, name), inside, meaning)
        _check_int("top_k", self.top_k, low=-1, meaning="a positive integer, or 0 or -1 for all tokens")
        _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        _check_int("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS)
        _check_truncation(self.truncate_prompt_tokens)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if self.greedy and self.n > 1:
            raise UsageError(
                f"n must be 1 when sampling is greedy (temperature {self.temperature}), got {self.n}.",
                hint="Greedy sequences would all be the same: set temperature above 0.",
            )
        if self.stop and not self.detokenize:
            raise UsageError("stop strings are looked for in the text: they cannot be used with detokenize=False.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def end_token_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """All tokens that end this request, given the model's end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some values changed; None makes one not said again. What was not said before stays so."""
        return type(self)(**{**self._filled(), **changes})._mark((self.explicit - changes.keys()) | _said(changes))

    def with_defaults(self, generation: Mapping[str, Any]) -> SamplingParams:
        """This request with the model's default sampling where it said nothing (BEHAVIOUR C10).

        Args:
            generation: the content of generation_config.json; keys that are not sampling are left alone, and null
                is the same as absent.

        Raises:
            ConfigError: a default that no request could have asked for.
        """
        defaults = {
            name: generation[key]
            for key, name in SAMPLING_KEYS.items()
            if generation.get(key) is not None and name not in self.explicit
        }
        if not defaults:
            return self
        for name, value in defaults.items():
            try:
                type(self)(**{name: value})
            except UsageError as error:
                raise ConfigError(
                    f"generation_config.json: {error.message}", hint="Set it in the request to override it."
                ) from error
        return type(self)(**{**self._filled(), **defaults})._mark(self.explicit)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `UsageError` if a token id in this request is not below the model's ``vocab_size`` (BEHAVIOUR T3)."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            beyond = [token_id for token_id in ids if token_id >= vocab_size]
            if beyond:
                raise UsageError(f"{name}: token id {beyond[0]} is beyond the model's vocabulary of {vocab_size}.")

    def _filled(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def _mark(self, explicit: Collection[str]) -> SamplingParams:
        object.__setattr__(self, "explicit", frozenset(explicit))
        return self


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "presence_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda value: value > 0, "greater than 0"),
    "temperature": (lambda value: value >= 0, "0 (greedy) or greater"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
}
_BOOLEANS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)  # fmt: skip

POOLING_TYPES = ("mean", "cls", "last")
POOLING_TASKS = ("embed", "classify", "score")


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How the hidden states of one request become one vector or score.

    ``None`` means "not said": the engine's arguments, then the checkpoint's own pooling config, then the
    architecture decide (BEHAVIOUR P1).

    Args:
        normalize: scale the embedding to length 1.
        dimensions: keep only this many first numbers of the embedding; cut before the scaling.
        pooling_type: "mean", "cls" or "last".
        use_activation: false gives a classifier's logits as they are.
        task: "embed", "classify" or "score"; None: the hidden states.
        truncate_prompt_tokens: keep only this many tokens, -1 for as many as the model takes: of a text as its
            tokenizer cuts it, special tokens kept; of token ids the last.

    Raises:
        UsageError: a value outside its range, or a name that does not exist.
    """

    normalize: bool | None = None
    dimensions: int | None = None
    pooling_type: str | None = None
    use_activation: bool | None = None
    task: str | None = None
    truncate_prompt_tokens: int | None = None

    def __new__(cls, **given: Any) -> PoolingParams:
        _refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _plain_numbers(self)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        _check_int("dimensions", self.dimensions, low=1)
        _check_truncation(self.truncate_prompt_tokens)
        for name, known in (("pooling_type", POOLING_TYPES), ("task", POOLING_TASKS)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or value.lower() not in known:
                raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
            object.__setattr__(self, name, value.lower())


def _refuse_unknown(cls: type, given: Mapping[str, Any]) -> None:
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            refuse_known(f"parameter of {cls.__name__}", name, SAMPLING_PARAMETERS)
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise UsageError(f"{cls.__name__} has no parameter {name!r}.", hint=hint)


def _said(given: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name, value in given.items() if value is not None or name == _NULL_MEANS_NULL)


def _fill_nulls(params: SamplingParams) -> None:
    for entry in dataclasses.fields(params):
        if getattr(params, entry.name) is None and entry.name != _NULL_MEANS_NULL:
            factory = entry.default_factory
            default = factory() if factory is not dataclasses.MISSING else entry.default
            object.__setattr__(params, entry.name, default)


def _plain_numbers(params: SamplingParams | PoolingParams) -> None:
    """Numbers of other types (NumPy's, say) as Python's own, which have no width to overflow and are plain JSON."""
    for entry in dataclasses.fields(params):
        value = getattr(params, entry.name)
        if type(value) in (int, float, bool) or not isinstance(value, Real):
            continue
        plain = int(value) if isinstance(value, Integral) else float(value) if _is_finite(value) else value
        object.__setattr__(params, entry.name, plain)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer or a fraction beyond all floats
        return False


def _check_float(name: str, value: Any, inside: Callable[[float], bool], meaning: str) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    if not number or not inside(value):
        raise UsageError(f"{name} must be {meaning}, got {value!r}.")


def _check_int(name: str, value: Any, *, low: int, high: int | None = None, meaning: str | None = None) -> None:
    """None passes: whether it may be None is a question of the default, not of the range."""
    if value is None:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise UsageError(f"{name} must be {meaning or bounds}, got {value!r}.")


def _check_truncation(value: Any) -> None:
    meaning = "a positive integer, or -1 for as many as the model takes"
    _check_int("truncate_prompt_tokens", value, low=-1, meaning=meaning)
    if value == 0:
        raise UsageError(f"truncate_prompt_tokens must be {meaning}, got 0.")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _strings(value: Any, name: str) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Collection) or isinstance(strings, Mapping):
        raise UsageError(f"{name} must be a string or a list of strings, got {value!r}.")
    for text in strings:
        if not isinstance(text, str) or not text:
            raise UsageError(f"{name} must hold strings that are not empty, got {text!r}.")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise UsageError(f"{name} must hold text, got half of a character in {text!r}.")
    return tuple(strings)


def _token_ids(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, Collection) or not all(_is_int(token_id) and token_id >= 0 for token_id in value):
        raise UsageError(f"{name} must be a list of token ids (integers of at least 0), got {value!r}.")
    return tuple(int(token_id) for token_id in value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, got {value!r}.")
    bias = {}
    for key, amount in value.items():
        # JSON has only strings as keys.
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not _is_int(token_id) or token_id < 0:
            raise UsageError(f"logit_bias must have token ids (integers of at least 0) as keys, got {key!r}.")
        if isinstance(amount, bool) or not isinstance(amount, Real) or not -100 <= float(amount) <= 100:
            raise UsageError(f"logit_bias must be in [-100, 100], got {amount!r} for token {token_id}.")
        bias[int(token_id)] = float(amount)
    return bias
