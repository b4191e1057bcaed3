"""Whatever a model writes reaches the client: as text, or as calls whose arguments are JSON objects."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from modelbay_server.answers.chat import ChatAnswer
from modelbay_server.answers.json_text import json_bytes
from modelbay_server.answers.tool_calls import ToolReader
from modelbay_server.schemas.chat import ChatBody
from modelbay_server.streaming import event
from modelbay_server.tool_forms import Hermes, Llama3Json, Mistral, calls_in


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


# -- calls

OBJECTS = [
    ('{"x": 1}', {"x": 1}),
    ("{}", {}),
    ("null", {}),
    ('""', {}),
    ('"  "', {}),
    (r'"{\"x\": [1.5, null]}"', {"x": [1.5, None]}),  # some models write the object as a text
    ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
    (r'{"x": "\ud83d\ude00"}', {"x": "😀"}),
]
NO_OBJECTS = [
    '"hello"', "[1]", "5", "true", '{"x": NaN}', '{"x": [-Infinity]}', '{"x": 1e999}', '"[1]"', r'"{\"x\": NaN}"',
    '{"x": ' + "9" * 5000 + "}", '{"x": ' + "[" * 950 + "]" * 950 + "}", '{"x": ' + "[" * 5000 + "]" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize(("written", "meant"), OBJECTS)
def test_arguments_are_the_json_object_that_was_written(written: str, meant: Any) -> None:
    for form, text in (
        (Hermes(), hermes(written)),
        (Llama3Json(), f'{{"name": "f", "parameters": {written}}}'),
        (Mistral(False), f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'),
    ):
        content, [call] = calls_in(form, text, ["f"])
        assert (content, json.loads(call.arguments)) == ("", meant)


@pytest.mark.parametrize("written", NO_OBJECTS, ids=lambda written: written[:16])
def test_what_is_no_json_object_is_no_call(written: str) -> None:
    for form, text in (
        (Hermes(), hermes(written)),
        (Llama3Json(), f'{{"name": "f", "parameters": {written}}}'),
        (Mistral(False), f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]'),
        (Mistral(True), f"[TOOL_CALLS]f[ARGS]{written}"),
    ):
        content, calls = calls_in(form, text, ["f"])
        for call in calls:  # nested so deep that it depends on the stack: if it is a call, it is a whole one
            assert "[" * 900 in written
            assert isinstance(json.loads(call.arguments), dict)
        assert calls or content == text


# -- halves of characters


def answer_to(text: str) -> bytes:
    """The body of a chat answer in which the model wrote this."""
    model: Any = SimpleNamespace(name="any", tokenizer=None)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    answer = ChatAnswer(body, model, ToolReader(Hermes(), ["f"]))
    sequence = SimpleNamespace(index=0, text=text, token_ids=[1], logprobs=None, finish_reason="stop", stop_reason=None)
    output = SimpleNamespace(prompt_token_ids=[1], outputs=[sequence], metrics=None, prompt_logprobs=None)
    return json_bytes(answer.whole([output]))


def test_half_a_character_in_a_call_is_no_error_of_ours() -> None:
    for text in (hermes(r'{"x": "\ud83d"}'), hermes(r'{"\udc00": 1}'), hermes("{}", r"f\ud83d")):
        [choice] = json.loads(answer_to(text))["choices"]
        [call] = choice["message"]["tool_calls"]
        function = call["function"]
        assert "\ufffd" in function["name"] + function["arguments"]
        assert isinstance(json.loads(function["arguments"]), dict)
        json.dumps(choice, ensure_ascii=False).encode()  # and the client can write down what it got


@pytest.mark.parametrize("value", ["\ud83d", "a\udfffb", {"\ud800": ["\udc00", {"x": ["\ud83d"] * 500}]}])
def test_no_text_breaks_an_answer(value: Any) -> None:
    for said in (json_bytes(value), event(value).removeprefix(b"data: ")):
        json.dumps(json.loads(said.decode()), ensure_ascii=False).encode()


def put_words(text: str, **more: Any) -> dict[str, Any]:
    """A request that makes the model say ``text``."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 120, "tools": tools,
            "structured_outputs": {"choice": [text]}, **more}  # fmt: skip


def test_half_a_character_over_http(tool_server: Any) -> None:
    body = put_words(hermes(r'{"x": "\ud83d"}'))
    whole = tool_server.post("/v1/chat/completions", {**body, "n": 2})
    assert whole.status_code == 200, whole.text
    for choice in whole.json()["choices"]:
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": "\ufffd"}
    events = tool_server.stream("/v1/chat/completions", body)
    deltas = [each for event in events for each in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [json.loads(delta["function"]["arguments"]) for delta in deltas] == [{"x": "\ufffd"}]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


# -- characters at which some clients end a line


def test_events_are_one_line_for_every_client() -> None:
    text = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA1), *range(0x2000, 0x2070), 0xFEFF])) + "é😀"
    said = event({"text": text})
    assert len(said.decode().rstrip("\n").splitlines()) == 1
    assert json.loads(said.decode().removeprefix("data: ")) == {"text": text}
    assert "é😀".encode() in said


def test_a_client_that_reads_lines_gets_whole_events(server: Any) -> None:
    text = "a\u2028b\u2029c\u0085d"
    body = {"prompt": text, "echo": True, "max_tokens": 0, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    assert server.text([json.loads(line.removeprefix("data: ")) for line in lines]) == text
