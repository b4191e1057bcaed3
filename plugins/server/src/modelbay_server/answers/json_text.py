"""Answers as JSON text that every client can read, however long they are.

* Half of a character, which a model can write in escapes, becomes U+FFFD: UTF-8 has no bytes for it.
* U+0085, U+2028 and U+2029 are escaped: JSON allows them as they are, and some clients take them for ends of lines.
* Long lists are written in runs. The encoder lets no other thread go on before it has returned, so what takes it
  seconds would stop the event loop from whichever thread it is called.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

#: Items of a list that are written at once.
_RUN = 128
#: Levels of an answer below which nothing is long but lists: choices, a choice, its log-probabilities.
_LEVELS = 4
#: Bytes up to which pieces are put together.
_BLOCK = 64 * 1024
_UNSAFE = re.compile("[\ud800-\udfff\u0085\u2028\u2029]")


class Shaped(Sequence[Any]):
    """A list of which each run is shaped as it is written, so that no more than one has to be there.

    Args:
        items: what the list is made of.
        shape: makes the list's items of a run of them.
    """

    def __init__(self, items: Sequence[Any], shape: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._items = items
        self._shape = shape

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: Any) -> Any:
        return self._shape(self._items[place]) if isinstance(place, slice) else self._shape([self._items[place]])[0]


def _items(value: Any) -> list[Any]:
    if isinstance(value, Shaped):
        return value[:]
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


#: Made once: `json.dumps` makes one at every call that asks for other than its defaults.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_items)


def short_json(value: Any) -> bytes:
    """`json_bytes` of what is not long, at once."""
    text = _ENCODER.encode(value)
    return (text if text.isascii() else _UNSAFE.sub(_safe, text)).encode()


def json_bytes(value: Any) -> bytes:
    """``value`` as JSON in UTF-8, without spaces. Keys are strings; lists may be `Shaped`."""
    return b"".join(_parts(value, _LEVELS, _Shared(value)))


def json_blocks(value: Any) -> list[bytes]:
    """`json_bytes` in pieces, of which those that are long and occur several times are one object."""
    blocks: list[bytes] = []
    small: list[bytes] = []
    size = 0
    for part in _parts(value, _LEVELS, _Shared(value)):
        if len(part) < _BLOCK:
            small.append(part)
            size += len(part)
        if small and (size >= _BLOCK or len(part) >= _BLOCK):
            blocks.append(b"".join(small))
            small, size = [], 0
        if len(part) >= _BLOCK:
            blocks.append(part)
    return [*blocks, b"".join(small)] if small else blocks


def _parts(value: Any, levels: int, shared: _Shared) -> Iterator[bytes]:
    if levels > 0 and isinstance(value, dict):
        yield from _dict(value, levels, shared)
    elif levels > 1 and isinstance(value, list):
        yield b"["
        for number, item in enumerate(value):
            yield b"," if number else b""
            yield from _parts(item, levels - 1, shared)
        yield b"]"
    elif isinstance(value, list | Shaped) and len(value) > _RUN:
        yield from shared.runs(value)
    else:
        yield short_json(value)


def _dict(value: dict[str, Any], levels: int, shared: _Shared) -> Iterator[bytes]:
    yield b"{"
    for number, (key, item) in enumerate(value.items()):
        yield (b"," if number else b"") + short_json(key) + b":"
        yield from _parts(item, levels - 1, shared)
    yield b"}"


class _Shared:
    """Long lists that an answer holds more than once, as choices do the log-probabilities of their prompt. They are
    written once; of all others nothing is kept."""

    def __init__(self, answer: Any) -> None:
        self._counts = Counter(map(id, _long_lists(answer, _LEVELS)))
        self._written: dict[int, list[bytes]] = {}

    def runs(self, value: Sequence[Any]) -> Iterable[bytes]:
        if self._counts[id(value)] < 2:
            return _runs(value)
        if id(value) not in self._written:
            self._written[id(value)] = list(_runs(value))
        return self._written[id(value)]


def _long_lists(value: Any, levels: int) -> Iterator[Sequence[Any]]:
    if levels > 0 and isinstance(value, dict):
        inner: Iterable[Any] = value.values()
    elif levels > 1 and isinstance(value, list):
        inner = value
    else:
        if isinstance(value, list | Shaped) and len(value) > _RUN:
            yield value
        return
    for item in inner:
        yield from _long_lists(item, levels - 1)


def _runs(value: Sequence[Any]) -> Iterator[bytes]:
    for at in range(0, len(value), _RUN):
        yield (b"," if at else b"[") + short_json(value[at : at + _RUN])[1:-1]
    yield b"]"


def _safe(match: re.Match[str]) -> str:
    character = match[0]
    return "\ufffd" if "\ud800" <= character <= "\udfff" else f"\\u{ord(character):04x}"
