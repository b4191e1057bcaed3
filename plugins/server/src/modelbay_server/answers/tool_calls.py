"""Calls of tools in the answers of /v1/chat/completions, read from a text that is whole or comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelbay_server.tool_forms import Call, ToolForm, calls_in


@dataclass(frozen=True)
class ToolReader:
    """How calls are found in one answer.

    Args:
        names: of the tools that were offered.
        prefix: what the prompt made the answer begin with.
        many: whether more than the first call counts.
        forced: whether nothing but calls is to be expected.
    """

    form: ToolForm
    names: Sequence[str]
    prefix: str = ""
    many: bool = True
    forced: bool = False

    def read(self, text: str, *, cut: bool) -> tuple[str, list[dict[str, Any]]]:
        """The text outside of calls, and the calls as clients get them.

        Args:
            cut: the output reached its greatest length.
        """
        content, calls = calls_in(self.form, text, self.names, cut=cut)
        return content, [self._shape(call) for call in (calls if self.many else calls[:1])]

    def _shape(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self.form.new_id(), "type": "function", "function": function}

    def stream(self) -> CallsInStream:
        return CallsInStream(self, self.prefix)


@dataclass(slots=True)
class CallsInStream:
    """Splits a text that comes in pieces. Text passes as soon as it cannot be the beginning of a call; what comes from
    the first call on is kept to the end."""

    reader: ToolReader
    _held: str = ""
    _calling: bool = field(default=False, init=False)
    _begins: bool = field(default=True, init=False)

    def text(self, piece: str) -> str:
        """What may be shown of the text so far and was not shown yet."""
        self._held += piece
        if self._calling:
            return ""
        at, self._calling = self.reader.form.find(self._held, begins=self._begins)
        shown, self._held = self._held[:at], self._held[at:]
        self._begins = self._begins and not shown
        return shown

    def finish(self, *, cut: bool) -> tuple[str, list[dict[str, Any]]]:
        """What is left to show as text, and the calls."""
        held, self._held = self._held, ""
        return self.reader.read(held, cut=cut) if self._calling else (held, [])
