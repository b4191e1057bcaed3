"""Numbers of a JSON schema that would be enforced as others: refused before the library reads them.

It keeps every number as a double, computes the neighbours of limits in doubles, and spells fractions by their digits.
Here stands what is lost on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LITERALS = ("const", "enum")
#: Integers up to here have doubles for both of their neighbours.
_LARGEST = 2**53 - 1
#: Digits that every double keeps of a fraction.
_DIGITS = 15
#: Multiples of numbers from here on are not followed.
_MULTIPLE = 10**9
#: A schema in a grammar.
_INLINE = re.compile(r"%json\s*(?=\{)")


def parse_schema(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or a number in it is not what a double would make of it.
    """
    return json.loads(text, parse_float=_as_written)


def inline_schemas(grammar: str) -> Iterator[Any]:
    """The schemas that stand in a grammar behind ``%json``. What is no JSON is left for the library to say."""
    decoder = json.JSONDecoder(parse_float=_as_written)
    for found in _INLINE.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except json.JSONDecodeError:
            continue


def check_numbers(node: Mapping[str, Any]) -> None:
    """Refuse numbers of one schema that would be enforced as others.

    Raises:
        ValueError: naming keyword and number.
    """
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
    if abs(number) > _LARGEST:
        shown = str(number) if abs(number) < 10**40 else "a number of over 40 digits"
        raise ValueError(f"{keyword} has {shown}, and numbers are enforced up to 2^53 - 1 ({_LARGEST}) only")


def _as_written(text: str) -> float:
    value = float(text)
    if Decimal(repr(value)) != Decimal(text):
        raise ValueError(f"the number {text[:40]} has more digits, or is larger, than a double can be")
    return value


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
