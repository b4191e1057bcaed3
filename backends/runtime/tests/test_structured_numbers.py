"""Numbers in a JSON schema: enforced as they are written, or refused by name."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import pytest

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import StructuredOutputs
from modelbay_runtime.structured.grammars import Grammars

BYTES = [bytes([byte]) for byte in range(256)]
SAFE = 2**53 - 1


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: BYTES, len(BYTES))


def matches(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether ``text``, byte by byte, is a whole output."""
    output: list[int] = []
    constraint = grammars.constraint(StructuredOutputs(json=schema), output)
    assert constraint is not None
    for byte in text.encode():
        if not constraint.allowed()[byte // 8] >> byte % 8 & 1:
            return False
        output.append(byte)
    constraint.allowed()
    return constraint.may_end


KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
REFUSED: list[tuple[Any, str]] = [
    ({"const": 2**53 + 1}, "const has 9007199254740993"),
    ({"const": -(2**53) - 1}, "const has -9007199254740993"),
    ({"const": 2**63}, "const has 9223372036854775808"),
    ({"const": 1e23}, r"const has 1e\+23"),
    ({"const": 10**400}, "const has a number of over 40 digits"),
    ({"enum": [5, 2**64 + 1]}, "enum has 18446744073709551617"),
    ({"enum": ["a", {"b": [1, 2**53 + 1]}]}, "enum has 9007199254740993"),
    ({"const": {"minimum": 2**53 + 1}}, "9007199254740993"),
    *(({"type": "integer", word: 1234567890123456789}, f"{word} has 1234567890123456789") for word in KEYWORDS),
    *(({"type": "integer", word: -(10**20)}, f"{word} has -1000") for word in KEYWORDS),
    *(({"type": "number", word: 2.0**60}, f"{word} has 1.15") for word in KEYWORDS),
    *(({"type": "number", word: 9.059673990867223}, f"{word} has 9.0596739908672.*15 digits") for word in KEYWORDS),
    ({"type": "integer", "multipleOf": 10**9}, "multipleOf has 1000000000, and is enforced below"),
    ('{"const": 0.10000000000000000555}', "const has 0.10000000000000000555, which has more digits"),
    ('{"type": "number", "minimum": 9007199254740993.0}', "minimum has 9007199254740993.0, which has more digits"),
    ('{"const": 1e-99999999999999999999999999}', "const has 1e-9999"),
    ('{"const": 1e400}', "the number 1e400 is larger"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_number_that_would_be_enforced_as_another_is_refused_by_name(
    grammars: Grammars, schema: Any, reason: str
) -> None:
    inner = json.loads(schema) if isinstance(schema, str) else schema
    given = [schema]
    if not isinstance(schema, str):
        given += [{"type": "object", "properties": {"inner": inner}}, {"$defs": {"a": inner}, "$ref": "#/$defs/a"}]
    for each in given:
        with pytest.raises(UsageError, match=f"the JSON schema cannot be used: .*{reason}"):
            grammars.constraint(StructuredOutputs(json=each), [])
        text = each if isinstance(each, str) else json.dumps(each)
        with pytest.raises(UsageError, match=f"the grammar cannot be used: .*{reason}"):
            grammars.constraint(StructuredOutputs(grammar=f'start: "a" %json {text}'), [])


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": 3, "default": 3.14159265358979323846}',
        {"const": 3, "examples": [{"maximum": 2**64 - 1}], "default": {"const": 2**70}},
        {"const": 3, "$defs": {"enum": {"type": "integer", "default": 2**63 - 1}, "const": {"title": "x"}}},
    ],
    ids=str,
)
def test_what_binds_nothing_is_not_looked_at(grammars: Grammars, schema: Any) -> None:
    assert matches(grammars, schema, "3")


def test_what_is_no_limit_may_be_as_large_as_it_likes(grammars: Grammars) -> None:
    schema = {"type": "integer", "default": 2**70, "minimum": 3, "maximum": 4, "title": "n"}
    assert matches(grammars, schema, "3")
    named = {"type": "object", "properties": {"minimum": {"type": "integer"}}, "required": ["minimum"]}
    assert matches(grammars, named, '{"minimum":9007199254740993}')


@pytest.mark.parametrize("keyword", KEYWORDS[:4])
@pytest.mark.parametrize("limit", [SAFE, -SAFE])
def test_the_largest_limits_are_exact(grammars: Grammars, keyword: str, limit: int) -> None:
    for number in range(limit - 2, limit + 3):
        assert matches(grammars, {"type": "integer", keyword: limit}, str(number)) is holds(keyword, limit, number)


def holds(keyword: str, limit: Any, number: Any) -> bool:
    return {
        "minimum": number >= limit,
        "maximum": number <= limit,
        "exclusiveMinimum": number > limit,
        "exclusiveMaximum": number < limit,
    }[keyword]


def test_the_largest_literals_are_exact(grammars: Grammars) -> None:
    for number in (SAFE, -SAFE, SAFE - 1):
        for schema in ({"const": number}, {"enum": [number, "a"]}):
            assert [matches(grammars, schema, str(number + step)) for step in (-1, 0, 1)] == [False, True, False]
    assert matches(grammars, {"const": 0.1 + 0.2}, "0.30000000000000004")
    assert not matches(grammars, {"const": 0.1 + 0.2}, "0.3")


def test_fractions_of_as_many_digits_as_are_taken_are_exact(grammars: Grammars) -> None:
    draw = random.Random(7)
    for keyword in KEYWORDS[:4] * 6:
        limit = float(f"{draw.uniform(-1, 1) * 10 ** draw.randint(-6, 12):.15g}")
        for _ in range(4):
            number = Decimal(repr(limit)) + draw.choice([-1, 0, 1]) * Decimal(10) ** draw.randint(-20, 3)
            text = format(number, "f").rstrip("0").rstrip(".") if number % 1 else str(int(number))
            expected = holds(keyword, Decimal(repr(limit)), number)
            assert matches(grammars, {"type": "number", keyword: limit}, text) is expected, (keyword, limit, text)


@pytest.mark.parametrize("multiple", [1e-9, 0.01, 2.5, 7, 100_000_000])
def test_multiples_are_exact(grammars: Grammars, multiple: float) -> None:
    step = Decimal(repr(multiple))
    for factor in (0, 1, 2, 7, 13):
        schema = {"type": "number", "multipleOf": multiple}
        assert matches(grammars, schema, spelt(step * factor))
        assert not matches(grammars, schema, spelt(step * factor + step / 10))


def spelt(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
