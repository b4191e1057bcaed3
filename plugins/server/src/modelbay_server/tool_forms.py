"""How models write calls of tools: found in what they wrote, and asked of them where a call is forced.

It is between a model and its chat template, so the template says which form a model has; ``--tool-call-parser`` says it
where the template does not. With any other template calls stay text, and none can be forced.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from modelbay.errors import UsageError


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Call:
    """A call as it was written. ``arguments``: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Forced:
    """What makes a model call: ``prefix`` stands at the end of the prompt, ``grammar`` (Lark) is what must follow."""

    prefix: str
    grammar: str


class NoCallError(ValueError):
    """What looked like a call is none."""


class ToolForm:
    """One way to write calls, with what most have in common: a word that stands before a call and nowhere else."""

    name: ClassVar[str]
    opening: ClassVar[str]
    #: Whether ``opening`` is a token that texts leave out unless special tokens are asked for.
    opening_is_special: ClassVar[bool] = False

    def find(self, text: str, *, begins: bool) -> tuple[int, bool]:
        """Where in ``text`` a call begins or, as more text comes, could turn out to begin; and whether it surely does.

        Args:
            begins: whether ``text`` is the beginning of what the model wrote.
        """
        at = text.find(self.opening)
        if at >= 0:
            return at, True
        most = min(len(self.opening) - 1, len(text))
        held = next((size for size in range(most, 0, -1) if self.opening.startswith(text[-size:])), 0)
        return len(text) - held, False

    def read(self, text: str, at: int, names: Sequence[str]) -> tuple[list[Call], int]:
        """The calls that begin at ``at``, and where they end.

        Args:
            names: of the tools that were offered.

        Raises:
            NoCallError: they are none.
        """
        raise NotImplementedError

    def forced(self, functions: Sequence[Mapping[str, Any]], *, many: bool) -> Forced:
        """What makes a model call one of these functions, or several where there may be ``many`` calls.

        Raises:
            UsageError: not possible in this form.
        """
        raise NotImplementedError

    def new_id(self) -> str:
        return f"call-{secrets.token_hex(16)}"


class Hermes(ToolForm):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, one after another: Hermes, Qwen and many since."""

    name = "hermes"
    opening = "<tool_call>"
    _close = "</tool_call>"

    def read(self, text: str, at: int, names: Sequence[str]) -> tuple[list[Call], int]:
        value, end = _json_at(text, at + len(self.opening))
        closed = _skip_space(text, end)
        if text.startswith(self._close, closed):
            return [_call(value)], closed + len(self._close)
        if not self._close.startswith(text[closed:]):
            raise NoCallError
        return [_call(value)], len(text)  # the closing word may be the token that ended the output

    def forced(self, functions: Sequence[Mapping[str, Any]], *, many: bool) -> Forced:
        more = _literal(f"\n{self._close}\n{self.opening}\n")
        rule = f"call ({more} call)*" if many else "call"
        end = _literal(f"\n{self._close}")
        return Forced(f"{self.opening}\n", f"start: {rule} {end}\n{_call_rules(functions, 'arguments')}")


class Llama3Json(ToolForm):
    """``{"name": …, "parameters": {…}}`` and nothing before it: Llama 3.1 to 3.3. Several stand with ``;`` between."""

    name = "llama3_json"
    opening = "<|python_tag|>"

    def find(self, text: str, *, begins: bool) -> tuple[int, bool]:
        """Only at the beginning. An object that is no call of a tool which was offered is the model's answer."""
        at = _skip_space(text, 0)
        if not begins or (at < len(text) and not self._may_be(text[at:])):
            return len(text), False
        return 0, at < len(text) and (text[at] == "{" or text.startswith(self.opening, at))

    def _may_be(self, text: str) -> bool:
        return text[0] == "{" or text.startswith(self.opening) or self.opening.startswith(text)

    def read(self, text: str, at: int, names: Sequence[str]) -> tuple[list[Call], int]:
        at = _skip_space(text, at)
        at += len(self.opening) if text.startswith(self.opening, at) else 0
        calls: list[Call] = []
        while True:
            value, end = _json_at(text, at)
            call = _call(value)
            if call.name not in names or not {"parameters", "arguments"} & set(value):
                raise NoCallError
            calls.append(call)
            at = _skip_space(text, end)
            if at == len(text):
                return calls, at
            if text[at] != ";":
                raise NoCallError
            at += 1

    def forced(self, functions: Sequence[Mapping[str, Any]], *, many: bool) -> Forced:
        rule = 'call ("; " call)*' if many else "call"
        return Forced("", f"start: {rule}\n{_call_rules(functions, 'parameters')}")


class Mistral(ToolForm):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name[ARGS]{…}`` of later tokenizers.

    ``[TOOL_CALLS]`` is a special token, which the text of an output has only where it is asked for.
    """

    name = "mistral"
    opening = "[TOOL_CALLS]"
    opening_is_special = True
    _args = "[ARGS]"
    _head = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")

    def __init__(self, with_args: bool) -> None:
        self._with_args = with_args

    def read(self, text: str, at: int, names: Sequence[str]) -> tuple[list[Call], int]:
        at += len(self.opening)
        if head := self._head.match(text, at):
            value, end = _json_at(text, head.end())
            return [Call(head[1], _arguments(value))], end
        value, end = _json_at(text, at)
        if not isinstance(value, list):
            raise NoCallError
        return [_call(each) for each in value], end

    def forced(self, functions: Sequence[Mapping[str, Any]], *, many: bool) -> Forced:
        if not self._with_args:
            rule = 'call (", " call)*' if many else "call"
            return Forced(self.opening, f'start: "[" {rule} "]"\n{_call_rules(functions, "arguments")}')
        if len(functions) > 1:
            raise UsageError(
                "a call of one of several tools cannot be forced: this model writes a special token after the name.",
                hint='Name one: tool_choice {"type": "function", "function": {"name": …}}.',
            )
        [function] = functions
        grammar = f"start: %json {json.dumps(_parameters(function))}"
        return Forced(f"{self.opening}{function['name']}{self._args}", grammar)

    def new_id(self) -> str:
        """Nine letters or digits: its templates refuse any other."""
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


#: What ``--tool-call-parser`` takes beside the forms' own names.
AUTO, NONE = "auto", "none"
PARSERS = (AUTO, NONE, Hermes.name, Llama3Json.name, Mistral.name)
#: What a template says that writes ``<tool_call>`` around something else than JSON.
_OTHER_CALLS = ("<function=", "<arg_key>", "<parameter=")


def tool_form(parser: str, template: str) -> ToolForm | None:
    """The form that ``parser`` names; for "auto" the one that a chat template speaks of, if it does of any."""
    if parser == AUTO:
        parser = _form_of(template)
    mistral = Mistral(with_args=Mistral._args in template)
    return {Hermes.name: Hermes(), Llama3Json.name: Llama3Json(), Mistral.name: mistral}.get(parser)


def _form_of(template: str) -> str:
    if Mistral.opening in template:
        return Mistral.name
    if Hermes.opening in template and not any(word in template for word in _OTHER_CALLS):
        return Hermes.name
    if re.search(r'"parameters\\?": ?dictionary of argument name', template):
        return Llama3Json.name
    return NONE


def calls_in(form: ToolForm, text: str, names: Sequence[str], *, cut: bool = False) -> tuple[str, list[Call]]:
    """The text outside of calls, and the calls. Where one of them is no call, everything is text.

    Args:
        cut: the output reached its greatest length, so the last call may lack its end; the ones before it count.
    """
    calls: list[Call] = []
    outside, at = "", 0
    while True:
        start, sure = form.find(text[at:], begins=at == 0)
        if not sure:
            return (outside + text[at:], []) if not calls else ((outside + text[at:]).rstrip(), calls)
        outside += text[at : at + start]
        try:
            found, at = form.read(text, at + start, names)
        except NoCallError:
            return (outside.rstrip(), calls) if cut and calls else (text, [])
        calls += found


def _json_at(text: str, at: int) -> tuple[Any, int]:
    at = _skip_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise NoCallError from error


def _call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCallError
    return Call(value["name"], _arguments(value.get("arguments", value.get("parameters"))))


def _arguments(written: Any) -> str:
    """JSON text of the object that ``written`` is, or, as some models write it, is the text of; none means ``{}``."""
    if isinstance(written, str):
        text = written.strip() or "null"
        written, end = _json_at(text, 0)
        if end != len(text):
            raise NoCallError
    if written is None:
        written = {}
    if not isinstance(written, dict):
        raise NoCallError
    try:
        return json.dumps(written, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NoCallError from error


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _call_rules(functions: Sequence[Mapping[str, Any]], key: str) -> str:
    """The rule ``call``: an object with the name of one of the functions and, under ``key``, arguments that fit it."""
    one = " | ".join(f"call{number}" for number in range(len(functions)))
    return "\n".join([f"call: {one}", *_each(functions, key)])


def _each(functions: Sequence[Mapping[str, Any]], key: str) -> Iterator[str]:
    for number, function in enumerate(functions):
        head = _literal(f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": ')
        yield f'call{number}: {head} arguments{number} "}}"'
        yield f"arguments{number}: %json {json.dumps(_parameters(function))}"


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments. A function that says nothing of them has none."""
    from modelbay_runtime.structured.compiler import read_strictly

    said = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    try:
        return read_strictly({"type": "object", **said})
    except ValueError as error:
        raise UsageError(f"the parameters of the tool {function['name']!r} cannot be followed: {error}.") from error


def _literal(text: str) -> str:
    """In a grammar; Lark's escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)
