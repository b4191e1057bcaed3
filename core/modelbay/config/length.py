"""The longest sequence: the model's own limit, and what the caller asks for (C7)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.config.facts import FactReader
from modelbay.errors import ConfigError, UsageError
from modelbay.rope import LENGTH_IS_ORIGINAL, RopeSpec
from modelbay.trace import Rejected

if TYPE_CHECKING:
    from modelbay.trace import Trace

#: The keys that limit positions, in config.json. The smallest one that is there counts.
LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
    "max_target_positions",
)
#: A tokenizer's "no limit" is written as a huge number (1e30 and the like).
HUGE = 10**8
FALLBACK = 2048
ALLOW_LONG = "MODELBAY_ALLOW_LONG_MAX_MODEL_LEN"
TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class _Limit:
    """Positions the model has, those it can be stretched to by what its config says, and where that is from."""

    length: int
    stretched: int
    source: str


def positions(reader: FactReader) -> tuple[int, str] | None:
    """The config's own number of positions, before RoPE scaling; None if it says none."""
    found = [(key, _length(reader.text.raw.get(key), f"the config's {key}")) for key in LENGTH_KEYS]
    said = [(value, key) for key, value in found if value is not None]
    if said and not reader.text.by_class:
        smallest, key = min(said)
        return smallest, reader.json_source(key)
    for key in LENGTH_KEYS:
        default = reader.find(key)
        if default is not None and (value := _length(default[0], f"the config's {key}")) is not None:
            return value, default[1]
    return None


def max_model_len(
    reader: FactReader,
    rope: Mapping[str, RopeSpec],
    tokenizer_config: Mapping[str, Any] | None,
    asked: int | None,
    trace: Trace,
    sentence_limit: tuple[int, str] | None = None,
) -> int:
    """The longest sequence in tokens.

    Args:
        sentence_limit: the longest text that an embedding model was made for, where it is less than it has positions,
            and who says so.

    Raises:
        UsageError: more was asked for than the model has, and nothing forces it.
    """
    limit = _model_limit(reader, rope)
    key = "model_max_length"
    tokenizer_limit = _length((tokenizer_config or {}).get(key), f"tokenizer_config.json's {key}")
    if asked is not None:
        if limit is not None and asked > limit.stretched:
            _refuse_unless_forced(asked, limit, trace)
        return reader.note("max_model_len", asked, trace.argument("max_model_len"))
    said = [HUGE if limit is None else limit.length, HUGE if tokenizer_limit is None else tokenizer_limit]
    if sentence_limit is not None and sentence_limit[0] < min(said):
        return reader.note("max_model_len", *sentence_limit)
    if limit is None and tokenizer_limit is None:
        trace.warn("config", "maximum length", FALLBACK, "neither config nor tokenizer says one; give max_model_len")
        return reader.note("max_model_len", FALLBACK, "derived: nothing says it")
    if limit is None or (tokenizer_limit is not None and tokenizer_limit < limit.length):
        assert tokenizer_limit is not None
        rejected = (Rejected(str(limit.length), limit.source),) if limit else ()
        trace.decide("config", "length limit", tokenizer_limit, "tokenizer_config.json", rejected=rejected)
        return reader.note("max_model_len", tokenizer_limit, "tokenizer_config.json (model_max_length)")
    return reader.note("max_model_len", limit.length, limit.source)


def _model_limit(reader: FactReader, rope: Mapping[str, RopeSpec]) -> _Limit | None:
    found = positions(reader)
    if found is None:
        return None
    length, source = found
    factors = [spec.parameters["factor"] for spec in rope.values() if spec.type in LENGTH_IS_ORIGINAL]
    if factors and min(factors) > 1:
        length = int(length * min(factors))
        source = f"derived: {found[0]} of {source} × RoPE factor {min(factors)}"
    return _Limit(length, max([length, *_yarn_lengths(rope)]), source)


def _yarn_lengths(rope: Mapping[str, RopeSpec]) -> list[int]:
    """What a yarn object says it stretches to: allowed when asked for, never taken by itself (C7)."""
    return [
        int(spec.parameters["factor"] * spec.parameters["original_max_position_embeddings"])
        for spec in rope.values()
        if spec.type == "yarn"
    ]


def _refuse_unless_forced(asked: int, limit: _Limit, trace: Trace) -> None:
    what = f"max_model_len {asked} is more than the model's {limit.stretched} ({limit.source})"
    if os.environ.get(ALLOW_LONG, "").strip().lower() not in TRUE:
        raise UsageError(
            f"{what}; positions beyond it give wrong output.", hint=f"Lower it, or set {ALLOW_LONG}=1 to force it."
        )
    trace.warn("config", "maximum length forced", asked, f"{what}; forced by {ALLOW_LONG}")


def _length(value: Any, key: str) -> int | None:
    """A length in tokens, None for what is no limit (null, huge, zero and less)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(f"{key} must be a number of tokens, got {value!r}.")
    return int(value) if 0 < value < HUGE else None
