"""What a specification is read as: expressions as Python reads them, lists and alternatives as long as is allowed."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import StructuredOutputs
from modelbay_runtime.structured.grammars import Grammars

BYTES = [bytes([byte]) for byte in range(256)]


def matches(grammars: Grammars, spec: StructuredOutputs, text: str) -> bool:
    """Whether ``text``, byte by byte, is a whole output."""
    output: list[int] = []
    constraint = grammars.constraint(spec, output)
    assert constraint is not None
    for byte in text.encode():
        allowed = constraint.allowed()
        assert constraint.error is None, constraint.error
        if not allowed[byte // 8] >> byte % 8 & 1:
            return False
        output.append(byte)
    constraint.allowed()
    assert constraint.error is None, constraint.error
    return constraint.may_end


def alternatives(count: int) -> list[tuple[str, dict[str, Any], str]]:
    """``(name, specification, prefix)``: each allows the prefix with any number below ``count`` behind it."""
    numbers = range(count)
    return [
        ("choice", {"choice": [f"choice {n}" for n in numbers]}, "choice "),
        ("lark", {"grammar": "start: " + "|".join(f'"a{n}"' for n in numbers)}, "a"),
        ("lark rule", {"grammar": 'start: "b" x\nx: ' + "|".join(f'"a{n}"' for n in numbers)}, "ba"),
        ("ebnf", {"grammar": "root ::= " + " | ".join(f'"{n}"' for n in numbers)}, ""),
        ("regex", {"regex": "|".join(f"{n}" for n in range(1500))}, ""),
        ("any of", {"json": {"anyOf": [{"const": n} for n in numbers]}}, ""),
    ]


@pytest.mark.parametrize(("name", "spec", "prefix"), alternatives(2500), ids=lambda value: str(value)[:9])
def test_thousands_of_alternatives_that_begin_alike(name: str, spec: dict[str, Any], prefix: str) -> None:
    """What is accepted must not fail once it has begun."""
    grammars, asked = Grammars(lambda: BYTES, len(BYTES)), StructuredOutputs(**spec)
    for number in (0, 7, 1234, 1499):
        assert matches(grammars, asked, f"{prefix}{number}"), name
    assert not matches(grammars, asked, f"{prefix}99999")
    assert not matches(grammars, asked, prefix)


@pytest.mark.parametrize("count", [10_000])
def test_as_many_choices_as_fit(count: int) -> None:
    grammars = Grammars(lambda: BYTES, len(BYTES))
    asked = StructuredOutputs(choice=[f"a{number}" for number in range(count)])
    assert matches(grammars, asked, f"a{count - 1}")
    assert not matches(grammars, asked, f"a{count}")


def test_choices_of_any_characters() -> None:
    choices = ['a"\n\\/b{}[]', "é€😀", "%{x}", "\x00\x1f", "a", "ab", "(?i)", "//i", "\\"]
    grammars, asked = Grammars(lambda: BYTES, len(BYTES)), StructuredOutputs(choice=choices)
    for text in choices:
        assert matches(grammars, asked, text), text
    assert not matches(grammars, asked, "abc")


#: What expressions are made of, at random; and what they are compared on.
PIECES = [
    "a", "b", "1", "_", " ", "\n", "é", "-", "\\", "/", "[", "]", "[^", "(", ")", "(?:", "|", "*", "+", "?", "{1}",
    "{2,3}", "{0,}", "^", "$", ".", r"\d", r"\W", r"\s", r"\w", "&&", "--", "~~", ":", "#", "(?i)", "(?x)", "(?s)",
    r"\b", r"\n", r"\t", r"\f", r"\a", r"\/", r"\-", r"\]", r"\[", r"\x41", "\\\n", r"\#", "\"", "'", "[a-z]",
    "[^a]", r"[\d]", r"[^\D]", "(?s:.)", "(?x: a b)", "(?i:A)", "(?P<n>a)", "[-a]", "\t", "%", "\\\\", "{", "}",
    ",", "[a&&b]", "[a--b]", "a*+", "a?+", "]", "a]",
]  # fmt: skip
TEXTS = [
    "", "a", "b", "1", "_", " ", "\n", "é", "-", "\\", "/", "ab", "aa", "aab", "ba", "A", "Ab", "a b", "a/b", "&", "~",
    ":", "#", "]", "[", "a\n", "\nb", "1a", '"', "\t", "a-", "a&", "aaa", "1 ", "a#", "a]", "a\\", "{", "a&]", "%",
]  # fmt: skip


def test_an_expression_is_read_as_python_reads_it_or_refused() -> None:
    """Of those that Python reads, and with ASCII classes as documented."""
    draw, grammars, compared = random.Random(5), Grammars(lambda: BYTES, len(BYTES)), 0
    for _ in range(900):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 5)))
        asked = StructuredOutputs(regex=text)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = re.compile(text, re.ASCII)
        except re.error as error:
            if "escape" in str(error) or "unterminated" in str(error):  # not a question of dialect
                with pytest.raises(UsageError):
                    grammars.constraint(asked, [])
            continue
        try:
            grammars.constraint(asked, [])
        except UsageError:
            continue
        compared += 1
        for sample in TEXTS:
            assert matches(grammars, asked, sample) == bool(expected.fullmatch(sample)), (text, sample)
    assert compared > 200


@pytest.mark.parametrize(
    ("text", "output"),
    [
        (r"a\\", "a\\"),
        (r"\\/", "\\/"),
        (r"a\\/b", "a\\/b"),
        ("[/]", "/"),
        (r"[\\]", "\\"),
        ("[]a]+", "]a"),
        (r"[\]&-]+", "]&-"),
        ("&&--~~", "&&--~~"),
        (r"[\&\&]", "&"),
        ("(?x)a b # c", "ab"),
        (r"\++", "++"),
        ("[*+?]+", "*+?"),
        (r"[[:alpha:]]+", "ab"),
        (r"\p{L}\z", "é"),
    ],
)
def test_what_looks_like_a_trap_and_is_none(text: str, output: str) -> None:
    assert matches(Grammars(lambda: BYTES, len(BYTES)), StructuredOutputs(regex=text), output)


@pytest.mark.parametrize("text", ["[[a-z]]", "[a[b]]", "[^[a]b]", "[[a-z]&&[aeiou]]", r"[a[\]]]"])
def test_a_class_within_a_class_is_refused(text: str) -> None:
    """Rust reads the union of both, Python a bracket among the characters of one."""
    with pytest.raises(UsageError, match="ambiguous"):
        Grammars(lambda: BYTES, len(BYTES)).constraint(StructuredOutputs(regex=text), [])


def test_a_bracket_in_a_class_is_a_character_if_it_is_escaped() -> None:
    assert matches(Grammars(lambda: BYTES, len(BYTES)), StructuredOutputs(regex=r"[a\[b]+"), "a[b")
