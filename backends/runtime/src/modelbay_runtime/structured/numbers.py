"""Numbers of a JSON schema that would be enforced as others: refused before the library reads them.

It keeps every number as a double, computes the neighbours of limits in doubles, and spells fractions by their digits.
Here stands what is lost on the way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeGuard

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LITERALS = ("const", "enum")
#: Keywords that bind nothing, whatever stands there.
_ANNOTATIONS = ("default", "example", "examples", "title", "description", "$comment")
#: Keywords whose objects are no schemas, but have names for them.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Integers up to here have doubles for both of their neighbours.
_LARGEST = 2**53 - 1
#: Digits that every double keeps of a fraction.
_DIGITS = 15
#: Multiples of numbers from here on are not followed.
_MULTIPLE = 10**9
#: A schema in a grammar.
_INLINE = re.compile(r"%json\s*(?=\{)")


class Written(float):
    """A number that knows how it was written."""

    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        if math.isinf(made):
            raise ValueError(f"the number {text[:40]} is larger than a double can be")
        made.text = text
        return made

    def is_exact(self) -> bool:
        """Whether it is what was written."""
        try:
            return Decimal(repr(float(self))) == Decimal(self.text)
        except InvalidOperation:  # an exponent that no decimal has
            return False


def parse_schema(text: str) -> Any:
    """The value of a JSON text, its fractions as `Written`.

    Raises:
        ValueError: it is none, or a number in it is larger than a double can be.
    """
    return json.loads(text, parse_float=Written)


def inline_schemas(grammar: str) -> Iterator[Any]:
    """The schemas that stand in a grammar behind ``%json``. What is no JSON is left for the library to say."""
    decoder = json.JSONDecoder(parse_float=Written)
    for found in _INLINE.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except json.JSONDecodeError:
            continue


def check_numbers(schema: Any) -> None:
    """Refuse numbers of a schema, and of those inside it, that would be enforced as others.

    Raises:
        ValueError: naming keyword and number.
    """
    for node in _schemas(schema):
        _check_own(node)


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all inside it; not what only looks like one, as an example does, or a property called "enum"."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            yield node
            for keyword, value in node.items():
                if keyword in _BY_NAME and isinstance(value, dict):
                    pending += value.values()
                elif keyword not in (*_LITERALS, *_ANNOTATIONS):
                    pending.append(value)


def _check_own(node: Mapping[str, Any]) -> None:
    for keyword in _LITERALS:
        for number in _numbers(node.get(keyword)):
            _check_size(keyword, number)
    for keyword in (*_LIMITS, "multipleOf"):
        limit = node.get(keyword)
        if not _is_number(limit):
            continue
        _check_size(keyword, limit)
        if limit != int(limit) and len(Decimal(repr(limit)).as_tuple().digits) > _DIGITS:
            raise ValueError(f"{keyword} has {limit}, and fractions are enforced up to {_DIGITS} digits only")
        if keyword == "multipleOf" and limit >= _MULTIPLE:
            raise ValueError(f"multipleOf has {limit}, and is enforced below {_MULTIPLE} only")


def _check_size(keyword: str, number: int | float) -> None:
    if isinstance(number, Written) and not number.is_exact():
        raise ValueError(f"{keyword} has {number.text[:40]}, which has more digits than a double")
    if abs(number) > _LARGEST:
        shown = str(number) if abs(number) < 10**40 else "a number of over 40 digits"
        raise ValueError(f"{keyword} has {shown}, and numbers are enforced up to 2^53 - 1 ({_LARGEST}) only")


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[int | float]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif _is_number(item):
            yield item
