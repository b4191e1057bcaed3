"""Texts from a file or standard input, one a line or one a JSON object, read as they are needed."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from modelbay.errors import UsageError

FORMATS = ("auto", "lines", "jsonl")
_KEYS = ("text", "prompt", "input", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Line:
    """One item of input. ``prompt``: as `LLM.embed` takes it; ``id``: the object's own, if it has one; ``size``: in
    bytes, for progress."""

    number: int
    prompt: Any
    id: Any = None
    size: int = 0


def read_lines(name: str, kind: str = "auto") -> Iterator[Line]:
    """Every line of a file, or of standard input (``-``); an empty one is an empty text, so that line n is row n.

    Args:
        kind: of `FORMATS`; "auto" takes a file that ends in ``.jsonl`` for JSON objects.

    Raises:
        UsageError: the file cannot be read, or a line is not what it should be; names it.
    """
    as_json = kind == "jsonl" or (kind == "auto" and name.endswith(".jsonl"))
    with _opened(name) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UsageError(f"{_shown(name)}, line {number}: not UTF-8 text (byte {error.start}).") from error
            prompt, own = _parsed(text, f"{_shown(name)}, line {number}") if as_json else (text, None)
            yield Line(number, prompt, own, len(raw))


def size_of(name: str) -> int | None:
    """Bytes of a file; None for standard input and what has no size."""
    size = Path(name).stat().st_size if name != "-" and Path(name).is_file() else 0
    return size or None


def _parsed(text: str, where: str) -> tuple[Any, Any]:
    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}.") from error
    if isinstance(value, str):
        return value, None
    key = next((key for key in _KEYS if isinstance(value, dict) and value.get(key) is not None), None)
    if key is None:
        raise UsageError(f"{where}: a JSON object with {', '.join(_KEYS[:-1])} or {_KEYS[-1]} was expected.")
    found, own = value[key], value.get("id")
    kind, wanted = (list, "a list of token ids") if key == "prompt_token_ids" else (str, "a text")
    if not isinstance(found, kind):  # numbers of several lines would be taken for one prompt's token ids
        raise UsageError(f"{where}: {key} is {wanted}, got {found!r:.100}.")
    return ({key: found} if kind is list else found), own


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not of JSON")


def _opened(name: str) -> IO[bytes]:
    if name == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb") if _has_descriptor() else sys.stdin.buffer
    try:
        return open(name, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}.") from error


def _has_descriptor() -> bool:
    """A test's standard input is no file."""
    try:
        sys.stdin.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _shown(name: str) -> str:
    return "standard input" if name == "-" else name


def in_windows(
    name: str, input_format: str, size: int, run: Callable[[list[Any]], list[Any]]
) -> Iterator[tuple[list[Line], list[Any]]]:
    """So many lines at a time, with what ``run`` makes of their texts.

    Raises:
        UsageError: as ``run`` raised it; what is about one prompt says which line that was.
    """
    lines = read_lines(name, input_format)
    while window := list(itertools.islice(lines, size)):
        yield window, _at_its_line(name, window, run)


def _at_its_line(name: str, window: list[Line], run: Callable[[list[Any]], list[Any]]) -> list[Any]:
    try:
        return run([line.prompt for line in window])
    except UsageError as error:
        index = getattr(error, "prompt_index", None)
        if index is None:  # wrong whatever the line
            raise
        cause = error.__cause__ if isinstance(error.__cause__, UsageError) else error
        raise UsageError(f"{_shown(name)}, line {window[index].number}: {cause.message}", hint=cause.hint) from error
