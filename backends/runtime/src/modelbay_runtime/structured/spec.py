"""What the output of a request must look like. Importing this costs no library: it is part of `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from modelbay.errors import UsageError

#: Longest text of each kind, in characters, that is compiled; what takes longest within these takes about a second.
#: They also bound how deep the compiler can recurse (see `modelbay_runtime.structured.compiler`).
MAX_CHARS = {"json": 2**17, "choice": 2**17, "grammar": 2**15, "regex": 2**13}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the output must look like: exactly one of the fields is given.

    Args:
        json: a JSON schema (2020-12), as a mapping or as JSON text; kept as JSON text.
        json_object: any JSON object.
        regex: a regular expression that the whole output matches; ``\\d``, ``\\w`` and ``\\s`` mean ASCII.
        choice: the texts of which the output is one.
        grammar: a context-free grammar, in Lark's syntax (``start: …``) or in EBNF (``root ::= …``).

    Raises:
        UsageError: none or several of them, one of the wrong type, or one that is too long.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __new__(cls, **given: Any) -> StructuredOutputs:
        _refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        names = [entry.name for entry in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise UsageError(f"structured_outputs takes exactly one of {', '.join(names)}; {found}.")
        [name] = given
        if name == "json":
            object.__setattr__(self, "json", _json_text(self.json))
        elif name == "choice":
            object.__setattr__(self, "choice", _choices(self.choice))
        elif name == "json_object":
            _require(self.json_object is True, f"json_object must be true or false, got {self.json_object!r}.")
        else:
            _check_text(name, getattr(self, name))
        object.__setattr__(self, "json_object", bool(self.json_object))
        kind, text = self.key
        if len(text) > MAX_CHARS[kind]:
            raise UsageError(
                f"structured_outputs: {name} has {len(text):,} characters, and at most {MAX_CHARS[kind]:,} are allowed."
            )

    @cached_property
    def key(self) -> tuple[str, str]:
        """The kind ("json", "regex", "choice" or "grammar") and its text: equal keys mean the same grammar."""
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(list(self.choice))
        if self.grammar is not None:
            return "grammar", self.grammar
        return "json", '{"type": "object"}' if self.json_object else str(self.json)


def read_structured_outputs(value: Any) -> StructuredOutputs | None:
    """``value`` as it may stand in a request: an instance, a mapping of its fields, or None.

    Raises:
        UsageError: anything else.
    """
    if value is None or isinstance(value, StructuredOutputs):
        return value
    _require(isinstance(value, Mapping), f"structured_outputs must be a StructuredOutputs, got {value!r}.")
    _refuse_unknown(StructuredOutputs, value)
    return StructuredOutputs(**value)


def _refuse_unknown(cls: type[StructuredOutputs], given: Mapping[Any, Any]) -> None:
    known = [entry.name for entry in fields(cls)]
    for name in given:
        _require(name in known, f"structured_outputs has no field {name!r}; known: {', '.join(known)}.")


def _json_text(schema: Any) -> str:
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            parsed = json.loads(schema)
        except ValueError as error:
            raise UsageError(f"structured_outputs: json is not JSON: {error}.") from error
        except RecursionError as error:
            raise UsageError("structured_outputs: the JSON schema is nested too deeply.") from error
        _require(isinstance(parsed, dict | bool), "structured_outputs: a JSON schema is an object, or true or false.")
        return schema
    name = type(schema).__name__
    _require(isinstance(schema, Mapping), f"structured_outputs: json must be a schema or JSON text, got {name}.")
    try:
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"structured_outputs: the JSON schema cannot be written as JSON: {error}.") from error
    except RecursionError as error:
        raise UsageError("structured_outputs: the JSON schema is nested too deeply.") from error


def _choices(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    _require(listed and len(value) > 0, f"structured_outputs: choice must be a list of texts, got {value!r:.80}.")
    for text in value:
        _check_text("choice", text)
    return tuple(value)


def _check_text(name: str, value: Any) -> None:
    _require(isinstance(value, str), f"structured_outputs: {name} must be text, got {type(value).__name__}.")
    # An empty regular expression is one; the empty text as a choice would be an output of nothing.
    _require(bool(value) or name == "regex", f"structured_outputs: {name} must not be empty.")
    half = any("\ud800" <= char <= "\udfff" for char in value)
    _require(not half, f"structured_outputs: {name} must be text, and holds half of a character.")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
