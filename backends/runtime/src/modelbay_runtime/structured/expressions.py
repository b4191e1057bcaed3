"""Regular expressions that the library would read as something else than they say: refused before it reads them.

It takes the syntax of Rust's crate regex, and rewrites an expression before that. Here stands what is lost on the way,
and what Rust takes for something else than Python does.
"""

from __future__ import annotations

import re

#: An escape, a class of characters, the beginning of a group, a quantifier with what follows it, or any character.
_PARTS = re.compile(
    r"(?P<escape>\\.?)"
    r"|(?P<characters>\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]?)"
    r"|\(\?(?P<flags>[a-zA-Z]*)"
    r"|(?:[*+?]|\{\d+(?:,\d*)?\})(?P<possessive>\+)?"
    r"|.",
    re.DOTALL,
)
_IN_CLASS = re.compile(r"\\.|\[:\^?\w+:\]|(?P<operation>&&|--|~~)|(?P<nested>\[)", re.DOTALL)


def check_expression(text: str) -> None:
    """Refuse what would be taken for another expression.

    Raises:
        ValueError: naming what it is.
    """
    for part in _PARTS.finditer(text):
        if part["escape"] == "\\":
            raise ValueError("it ends in a backslash that escapes nothing")
        if part["possessive"]:
            raise ValueError(f"{part[0]!r} at position {part.start()} is possessive, which is not supported")
        if "x" in (part["flags"] or "") and re.search(r"[\t\n\r]", text):
            raise ValueError("tabs and line breaks under the flag x are not supported: leave them out")
        for found in _IN_CLASS.finditer((part["characters"] or "")[1:]):
            if found["operation"] or found["nested"]:
                raise ValueError(f"{found[0]!r} in {part[0][:80]!r} is ambiguous: escape its first character")
