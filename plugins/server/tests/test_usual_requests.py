"""What clients usually send, though it says nothing: nulls, empty lists, answers of the model as they came back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from modelbay_server.schemas.chat import ChatBody
from modelbay_server.schemas.completions import CompletionBody
from modelbay_server.schemas.tokens import TokenizeBody

USER = {"role": "user", "content": "The quick"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
#: As Llama 3.1's: it asks whether there is the field, and calls without a list of them are its end.
TEMPLATE = (
    "{% for message in messages %}{% if 'tool_calls' in message %}"
    "{{ message.tool_calls[0].function.name }}({{ message.tool_calls[0].function.arguments.city }})"
    "{% elif message.refusal is defined %}refused"
    "{% else %}{{ message.role }}: {{ message.content }}{% endif %};{% endfor %}"
)


@pytest.fixture(scope="module")
def asking(with_template: Callable[[str], Path], serving_in_module: Callable[..., Any]) -> Iterator[Any]:
    with serving_in_module((with_template(TEMPLATE), "asking")) as server:
        yield server


def optional(body: type[BaseModel]) -> dict[str, None]:
    return {name: None for name, field in body.model_fields.items() if not field.is_required()}


@pytest.mark.parametrize(
    ("path", "body", "given"),
    [
        ("/v1/completions", CompletionBody, {"prompt": "The quick", "max_tokens": 2, "temperature": 0}),
        ("/v1/chat/completions", ChatBody, {"messages": [USER], "max_tokens": 2, "temperature": 0}),
        ("/tokenize", TokenizeBody, {"prompt": "The quick"}),
        ("/tokenize", TokenizeBody, {"messages": [USER]}),
    ],
)
def test_null_is_the_same_as_absent(server: Any, path: str, body: type[BaseModel], given: dict[str, Any]) -> None:
    plain, nulls = server.post(path, {**given, "model": "tiny"}), server.post(path, {**optional(body), **given})
    assert nulls.status_code == 200, nulls.text
    drop = ("id", "created", "usage")  # of which the cached part grows
    assert {k: v for k, v in plain.json().items() if k not in drop} == {
        k: v for k, v in nulls.json().items() if k not in drop
    }


@pytest.mark.parametrize(
    "more",
    [
        {"audio": None, "function_call": None, "functions": None, "prediction": None},
        {"modalities": ["text"]},
        {"stream_options": {"include_usage": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": None, "strict": None}}],
         "tool_choice": "none"},
        {"tools": []},
    ],
)  # fmt: skip
def test_what_says_nothing_is_accepted(server: Any, more: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", {"messages": [USER], "max_tokens": 2, **more})
    assert response.status_code == 200, response.text


def text_of(server: Any, messages: list[dict[str, Any]]) -> str:
    """The conversation as the template rendered it."""
    answer = server.post("/tokenize", {"messages": messages})
    assert answer.status_code == 200, answer.text
    return str(server.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"])


def test_a_message_without_calls_has_no_field_for_them(asking: Any) -> None:
    said = {"role": "assistant", "content": "fox"}
    plain = text_of(asking, [USER, said])
    assert "assistant: fox" in plain
    nothing: list[dict[str, Any]] = [
        {"tool_calls": []},
        {"tool_calls": None},
        {"refusal": None, "annotations": [], "audio": None},
    ]
    for more in nothing:
        assert text_of(asking, [USER, {**said, **more}]) == plain, more
    called = text_of(asking, [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert "f(Rome)" in called


def test_a_refusal_is_what_the_model_said(asking: Any) -> None:
    plain = text_of(asking, [USER, {"role": "assistant", "content": "no"}])
    parts = [{"type": "refusal", "refusal": "no"}]
    assert text_of(asking, [USER, {"role": "assistant", "content": parts}]) == plain
    assert text_of(asking, [{"role": "user", "content": []}]) == text_of(asking, [{"role": "user", "content": ""}])
    for wrong in (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": None, "text": "x"}]},
    ):
        response = asking.post("/tokenize", {"messages": [wrong]})
        assert response.status_code == 400, response.text
        assert "refusal" in response.json()["error"]["message"] or "text" in response.json()["error"]["message"]


def test_an_answer_of_the_openai_client_may_be_sent_back_as_it_is(asking: Any) -> None:
    """It has every field of the API, most of them null."""
    client = openai.OpenAI(base_url=asking.url + "/v1", api_key="unused", max_retries=0)
    create = client.chat.completions.create
    first = create(model="asking", messages=[USER], max_tokens=3, temperature=0).choices[0].message  # type: ignore[list-item]
    again: Any = [USER, {**first.model_dump(), "content": "fox"}, USER]
    assert create(model="asking", messages=again, max_tokens=3).choices[0].message.content is not None
    assert text_of(asking, again) == text_of(asking, [USER, {"role": "assistant", "content": "fox"}, USER])
