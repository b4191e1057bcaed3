"""Calls of tools in what a model wrote.

How calls are written is between a model and its chat template. One way is read here, that of Hermes and many since:
a JSON object between ``<tool_call>`` and ``</tool_call>``. It is looked for where the template itself speaks of it;
with any other template the text stays text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from modelbay_server.answers.common import new_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}\s*(.*?)\s*(?:{CLOSE}|\Z)", re.S)


def template_writes_calls(template: str) -> bool:
    return OPEN in template


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls. Where one of them is no call, everything is text."""
    at = text.find(OPEN)
    if at < 0:
        return text, []
    calls = [_call(match[1]) for match in _CALL.finditer(text)]
    found = [call for call in calls if call is not None]
    return (text, []) if len(found) != len(calls) else (text[:at].rstrip(), found)


def _call(written: str) -> dict[str, Any] | None:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": new_id("call"), "type": "function", "function": {"name": value["name"], "arguments": arguments}}


@dataclass(slots=True)
class CallsInStream:
    """Splits a text that comes in pieces. Text passes as soon as it cannot be the beginning of a call; what comes from
    the first call on is kept to the end."""

    _held: str = ""
    _calling: bool = False

    def text(self, piece: str) -> str:
        """What may be shown of the text so far and was not shown yet."""
        self._held += piece
        if self._calling:
            return ""
        at = self._held.find(OPEN)
        self._calling = at >= 0
        end = at if self._calling else len(self._held) - _overlap(self._held)
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left to show as text, and the calls."""
        held, self._held = self._held, ""
        return read_calls(held)


def _overlap(text: str) -> int:
    """Length of the longest end of ``text`` that a call could begin with."""
    return next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-size:])), 0)
