"""JSON that is checked value by value: what was damaged or edited by hand is refused with the place that is wrong.

Lock files and the trust record decide what may run, so nothing in them is guessed, and nothing is overlooked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class RepeatedKeyError(ValueError):
    """An object has ``key`` twice: one of the two values would go unseen."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"the key {_short(key)} twice in one object")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``object_pairs_hook``.

    Raises:
        RepeatedKeyError: it has a key twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RepeatedKeyError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return found


def parse(text: str) -> Any:
    """The value; a key twice in one object is an error.

    Raises:
        ValueError: it is no such JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check(value: Any, where: str, right: bool, wanted: str) -> None:
    """Raises ValueError unless ``right``: ``where`` must be ``wanted``."""
    if not right:
        raise ValueError(f"{where} must be {wanted}, got {_short(value)}")


def check_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {_short(value)}")
    return value


def check_keys(value: Any, where: str, keys: tuple[str, ...]) -> None:
    """An object with exactly these keys."""
    unknown = sorted(check_object(value, where).keys() - set(keys))
    absent = [key for key in keys if key not in value]
    if unknown or absent:
        said = f"unknown key {_short(unknown[0])}" if unknown else f"no key {absent[0]!r}"
        raise ValueError(f"{where} has {said}")


def check_format(value: Any, known: int) -> None:
    """The number of the form; true and 1.0 are equal to 1 in Python, and no such number."""
    if type(value) is not int or value != known:
        raise ValueError(f"format {_short(value)}, this version reads {known}")


def check_commit(value: Any, where: str) -> None:
    check(value, where, is_none_or(value, _COMMIT), "a full commit (40 hexadecimal digits) or null")


def check_files(value: Any, where: str) -> None:
    """Names of files in a repository, each with its SHA-256."""
    for name, digest in check_object(value, where).items():
        path = PurePosixPath(name)
        inside = bool(name) and not path.is_absolute() and ".." not in path.parts
        check(name, f"a name in {where}", inside, "a path inside the model")
        check(digest, f"{where}[{name!r}]", digest is not None and is_none_or(digest, _SHA256), "a SHA-256")


def is_none_or(value: Any, pattern: re.Pattern[str]) -> bool:
    return value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
