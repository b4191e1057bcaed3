"""response_format and structured_outputs: what comes back is what was asked for, whatever the model would say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 1.0, "max_tokens": 300}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema_is_kept(server: Any, seed: int) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    body = {**CHAT, "seed": seed, "response_format": asked}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    said = json.loads(choice["message"]["content"])
    assert said["name"] in ("Ann", "Bo")
    assert 1 <= said["age"] <= 99
    assert set(said) == {"name", "age"}
    assert choice["finish_reason"] == "stop"
    assert json.loads(server.text(server.stream("/v1/chat/completions", body))) == said


def test_text_is_no_format_and_json_object_is_one(server: Any) -> None:
    plain = server.post("/v1/chat/completions", {**CHAT, "seed": 1, "max_tokens": 8}).json()
    text = {**CHAT, "seed": 1, "max_tokens": 8, "response_format": {"type": "text"}}
    assert server.post("/v1/chat/completions", text).json()["choices"] == plain["choices"]
    body = {**CHAT, "max_tokens": 60, "seed": 1, "response_format": {"type": "json_object"}}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_a_json_schema_without_a_schema_is_any_object(server: Any) -> None:
    """As OpenAI's API has it, where ``schema`` may be left out."""
    body = {**CHAT, "max_tokens": 60, "seed": 1}
    formats = (
        {"type": "json_object"},
        *({"type": "json_schema", "json_schema": j} for j in ({"name": "x"}, {"name": "x", "schema": None})),
    )
    said = [server.post("/v1/chat/completions", {**body, "response_format": f}).json()["choices"] for f in formats]
    assert said[0] == said[1] == said[2]


def test_a_number_that_no_double_holds_is_refused_and_not_rounded(server: Any) -> None:
    schema = {"const": 2**53 + 1}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "response_format": asked}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": json.dumps(schema)}}),
    ):
        response = server.post(path, body)
        assert response.status_code == 400
        assert "const has 9007199254740993" in response.json()["error"]["message"]


def test_regex_and_choice(server: Any) -> None:
    body = {"prompt": "Numbers", "max_tokens": 40, "seed": 2}
    number = server.post("/v1/completions", {**body, "structured_outputs": {"regex": "[0-9]{3}"}}).json()
    assert re.fullmatch("[0-9]{3}", number["choices"][0]["text"])
    word = server.post("/v1/completions", {**body, "structured_outputs": {"choice": ["yes", "no"]}}).json()
    assert word["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "wanted",
    [{}, {"regex": "["}, {"regex": "a", "choice": ["b"]}, {"json": {"type": "nonsense"}}, {"no_such": 1},
     {"choice": []}, {"choice": [5]}, {"grammar": "start: %%"}, {"json_object": "yes"}, {"json": 5}],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_400(server: Any, wanted: dict[str, Any], stream: bool) -> None:
    body = {"prompt": "Numbers", "max_tokens": 4, "structured_outputs": wanted, "stream": stream}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
