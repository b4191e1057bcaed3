"""What takes long is not done where everybody waits: not on the event loop, and not on an engine's thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

LONG = "fox " * 3000
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "x"}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


#: Conversations whose messages are short and of which the template makes much text.
LARGE: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": LONG}}}]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"city": "' + LONG + '"}')]}]},
    {"messages": [{**USER, "name": LONG}]},
    {"chat_template_kwargs": {"shout": LONG}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
]


@pytest.mark.parametrize("path", ["tokens", "chat"])
def test_a_template_that_makes_much_text_is_rendered_beside_the_event_loop(
    tool_server: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    seen: list[str] = []
    module = f"modelbay_server.routes.{path}"
    read = __import__(module, fromlist=["read_chat"]).read_chat

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(threading.current_thread().name)
        return read(*args, **kwargs)

    monkeypatch.setattr(f"{module}.read_chat", watched)
    route = "/tokenize" if path == "tokens" else "/v1/chat/completions"
    more = {} if path == "tokens" else {"max_tokens": 1, "truncate_prompt_tokens": 8}
    for change in LARGE:
        response = tool_server.post(route, {"messages": [USER], **more, **change})
        assert response.status_code == 200, response.text
    assert len(seen) == len(LARGE)
    assert all(name.startswith("text") for name in seen), seen
    assert tool_server.post(route, {"messages": [USER], **more}).status_code == 200
    assert not seen[-1].startswith("text")  # what is short does not pay for another thread


def test_the_grammar_of_forced_calls_is_written_beside_the_event_loop(
    tool_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelbay_server.routes import chat

    original, seen = chat.with_tools, list[str]()

    def watched(*args: Any) -> Any:
        seen.append(threading.current_thread().name)
        return original(*args)

    monkeypatch.setattr(chat, "with_tools", watched)
    parameters = {"type": "object", "properties": {f"k{number}": {} for number in range(1000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required", "max_tokens": 1}
    assert "490" in tool_server.post("/v1/chat/completions", body).json()["error"]["message"]
    assert len(seen) == 1
    assert seen[0].startswith("text")


def test_token_strings_are_made_where_the_text_is_encoded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.on_engine(lambda llm: llm.get_tokenizer())
    original, seen = tokenizer.convert_ids_to_tokens, list[str]()

    def watched(ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(threading.current_thread().name)
        return original(ids, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", watched, raising=False)
    answer = server.post("/tokenize", {"prompt": LONG, "return_token_strs": True}).json()
    assert len(answer["token_strs"]) == answer["count"] > 3000
    assert seen
    assert all(name.startswith("text") for name in seen), seen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_words_are_encoded_once_and_not_by_the_engines_thread(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Else everybody waits for it, n times for each prompt, even when the client has gone."""
    lists = server.on_engine(lambda llm: llm.engine.bad_words)
    encode, seen = lists._encode, list[tuple[str, int]]()

    def watched(texts: list[str]) -> Any:
        seen.append((threading.current_thread().name, len(texts)))
        return encode(texts)

    monkeypatch.setattr(lists, "_encode", watched)
    words = [f"{path} {stream} {number}" for number in range(200)]
    given = {"prompt": ["The quick", "brown"]} if path == "/v1/completions" else {"messages": [USER]}
    body = {**given, "n": 8, "max_tokens": 2, "bad_words": words, "stream": stream}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert [count for _, count in seen] == [400]
    assert seen[0][0].startswith("text")
    server.wait_until_idle()
