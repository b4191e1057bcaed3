"""The body of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from modelbay.errors import UsageError
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_server.schemas.common import Fields, SamplingBody, check_total

#: Parts of a message that are no text.
_MEDIA = ("image_url", "input_audio", "audio_url")


class Message(Fields):
    """One message. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True)

    role: Annotated[str, Field(min_length=1, max_length=100)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(Fields):
    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Fields):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(Fields):
    """The one tool that is to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Any JSON object, if there is none.")
    strict: bool | None = None


class ResponseFormat(Fields):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """Answer a conversation, rendered by the model's own chat template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1)] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be more than one call.")

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the model's template.")
    reasoning_effort: str | None = Field(None, description="A variable of the template, where the template has it.")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template gets."""
        return None if self.tool_choice == "none" else plain_tools(self.tools)

    @property
    def forced_functions(self) -> list[dict[str, Any]] | None:
        """The functions of which one is to be called, if one is."""
        if self.tool_choice != "required" and not isinstance(self.tool_choice, NamedTool):
            return None
        functions = [tool["function"] for tool in plain_tools(self.tools) or ()]
        if isinstance(self.tool_choice, NamedTool):
            functions = [each for each in functions if each["name"] == self.tool_choice.function.name]
        return functions

    def variables(self) -> dict[str, Any]:
        """What the client says to the template."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            given.setdefault("reasoning_effort", self.reasoning_effort)
        return given

    def params(self, default_max_tokens: int | None) -> SamplingParams:
        """Args:
            default_max_tokens: the model's own, where it has one; else the output may fill the context.

        Raises:
            UsageError: what the fields say together makes no sense, or is not offered.
        """
        self._check()
        more: dict[str, Any] = {}
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if asked is not None or default_max_tokens is None:
            more["max_tokens"] = asked
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None and self.response_format.type != "text":
            more["structured_outputs"] = self._structured()
        return self.sampling(**more)

    def _check(self) -> None:
        check_total(1, self.n or 1)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UsageError("max_tokens and max_completion_tokens are two names of one number, and they differ.")
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs needs logprobs to be true.")
        self._check_tools()
        both = self.add_generation_prompt and self.continue_final_message
        if both and "add_generation_prompt" in self.model_fields_set:
            raise UsageError("add_generation_prompt and continue_final_message exclude each other.")

    def _check_tools(self) -> None:
        forced = self.forced_functions
        if forced is None:
            return
        if not forced:
            known = ", ".join(repr(tool.function.name) for tool in self.tools or ()) or "none"
            raise UsageError(f"tool_choice asks for a tool that tools does not have; it has {known}.")
        if self.structured_outputs is not None or (self.response_format and self.response_format.type != "text"):
            raise UsageError("a tool_choice that forces a call says what the output is; no other format may be given.")

    def _structured(self) -> dict[str, Any]:
        assert self.response_format is not None
        if self.response_format.type == "json_object":
            return {"json_object": True}
        if self.response_format.json_schema is None:
            raise UsageError("response_format of type json_schema needs json_schema.")
        schema = self.response_format.json_schema.schema_
        return {"json_object": True} if schema is None else {"json": schema}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: texts, parts where there are images or audio, and the arguments of calls as
    objects.

    Raises:
        UsageError: a part that is none of those that are known, or a call that is none.
    """
    return [_plain(message, position) for position, message in enumerate(messages)]


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates take them."""
    if not tools:
        return None
    return [tool.model_dump(exclude_unset=True) | {"type": "function"} for tool in tools]


def _plain(message: Message, position: int) -> dict[str, Any]:
    given = message.model_dump(exclude_unset=True)
    # Templates ask whether a message has calls by whether it has the field: a list without any is none.
    plain = {name: value for name, value in given.items() if value != []}
    if isinstance(message.content, list):
        parts = [_part(part, message.role, position) for part in message.content]
        plain["content"] = parts
        if all(part["type"] == "text" for part in parts):
            plain["content"] = "\n".join(part["text"] for part in parts)
    elif message.content is None:
        plain["content"] = ""
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, position) for call in message.tool_calls]
    return plain


def has_media(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether messages, as `plain_messages` gives them, have images or audio."""
    return any(isinstance(message.get("content"), list) for message in messages)


def _part(part: dict[str, Any], role: str, position: int) -> dict[str, Any]:
    if part.get("type") == "refusal" and role == "assistant":
        part = {"type": "text", "text": part.get("refusal")}  # to the model it is what it said
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", *_MEDIA) or (kind == "text" and not isinstance(text, str)):
        known = ", ".join(("text", *_MEDIA))
        raise UsageError(f"message {position} has a part of type {str(kind)[:100]!r} or without its text: {known}.")
    return part


def _plain_call(call: dict[str, Any], position: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"message {position} has a tool call without a function and its name.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"message {position} has a tool call whose arguments are not JSON.") from error
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
