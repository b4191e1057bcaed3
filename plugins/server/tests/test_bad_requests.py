"""Whatever a client sends: an error in the API's shape that says what is wrong, and never a fault of ours."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

JSON = {"Content-Type": "application/json"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "The quick", "max_tokens": 2}


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, after its shape was checked."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_case_40_a_wrong_model_name_is_404_with_the_names_there_are(server: Any) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "a"}),
                       ("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):  # fmt: skip
        error = refused(server.post(path, {**body, "model": "gpt-9"}), 404)
        assert "'tiny'" in error["message"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    refused(server.get("/v1/models/gpt-9"), 404)
    refused(server.get("/v1/modelbay/explain", params={"model": "gpt-9"}), 404)


def test_case_40_a_wrong_task_is_400_and_says_which_would_do(server: Any) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]}),
                       ("/v1/rerank", {"query": "a", "documents": ["b"]}),
                       ("/score", {"text_1": "a", "text_2": "b"})):  # fmt: skip
        error = refused(server.post(path, body))
        assert "served for generate" in error["message"]
        assert "embed" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_case_40_over_length_is_400_before_streaming_starts(server: Any, stream: bool) -> None:
    long = {"prompt": [1] * 512, "stream": stream}
    assert "512 tokens" in refused(server.post("/v1/completions", long))["message"]
    chat = {"messages": [{"role": "user", "content": "fox " * 600}], "stream": stream}
    assert "max_model_len=512" in refused(server.post("/v1/chat/completions", chat))["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_of_a_list_refuses_the_request_and_leaves_nothing(server: Any, stream: bool) -> None:
    body = {"prompt": [[1, 2], [1] * 600], "max_tokens": 200, "stream": stream}
    refused(server.post("/v1/completions", body))
    server.wait_until_idle()
    free, usable = server.free_blocks()
    assert free == usable


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""} | {"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e400}, "Infinity"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n:"),
    ({"n": 10**9}, "n:"),
    ({"n": 2, "temperature": 0}, "greedy"),
    ({"n": 1.5}, "n:"),
    ({"best_of": 3}, "best_of"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "echo"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"logprobs": 99}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [256]}, "256"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "256"),
    ({"logit_bias": {"9" * 40: 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a" * 1000] * 132}, "bad_words: hold 132,000 characters"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "include_usage"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [[1], "a", 5]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [256]}, "256"),
    ({"prompt": ["a"] * 5000}, "5000"),
    ({"prompt": ["a"] * 100, "n": 100}, "10000"),
    ({"tempreature": 1}, "tempreature"),
    ({"model": 5}, "model"),
    ({"structured_outputs": {"no_such": 1}}, ""),
]


@pytest.mark.parametrize(("change", "named"), WRONG)
def test_a_wrong_field_of_a_completion_is_named(server: Any, change: dict[str, Any], named: str) -> None:
    import json

    content = json.dumps({**TEXT, **change})
    assert named in refused(httpx.post(server.url + "/v1/completions", content=content, headers=JSON))["message"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "role"),
        ({"messages": [{"role": 5}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "an image"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [{}]}, "function"),
        ({"tools": [{"type": "other", "function": {"name": "f"}}]}, "type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(server: Any, change: dict[str, Any], named: str) -> None:
    assert named in refused(server.post("/v1/chat/completions", {**CHAT, **change}))["message"]


CALL = {"type": "function", "function": {"name": "f"}}
#: What is wrong, and the field that the answer names for it: the client's own path, without the ways to read it.
FIELDS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/completions", {**TEXT, "stop": 5}, "stop", "Input should be a valid string or a valid list"),
    ("/v1/completions", {**TEXT, "stop": ["a", 5]}, "stop.1", "Input should be a valid string"),
    ("/v1/completions", {}, "prompt", "Field required"),
    ("/v1/completions", {"prompt": None}, "prompt", "Field required"),
    ("/v1/completions", {**TEXT, "logit_bias": {"5": "x"}}, "logit_bias.5", "Input should be a valid number"),
    ("/v1/completions", {**TEXT, "temperature": 10**400}, "temperature", "Input should be a valid number"),
    ("/v1/completions", {**TEXT, "stream_options": {"body": 1}}, "stream_options.body", "unknown field"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages.0.content",
     "Input should be a valid string or a valid list"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": ["str"]}]}, "messages.0.content.0",
     "Input should be an object"),
    ("/v1/chat/completions", {**CHAT, "messages": [5]}, "messages.0", "Input should be an object"),
    ("/v1/chat/completions", {**CHAT, "messages": [{}]}, "messages.0.role", "Field required"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": "x"}, "tool_choice", "'none', 'auto' or 'required' or an object"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": {"type": "function"}}, "tool_choice.function", "Field required"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": {**CALL, "y": 1}}, "tool_choice.y", "unknown field"),
    ("/v1/chat/completions", {**CHAT, "modalities": ["audio"]}, "modalities.0", "Input should be 'text'"),
    ("/rerank", {"documents": ["a"]}, "query", "Field required"),
    ("/rerank", {"documents": ["a"], "query": 5}, "query", "Input should be a valid string"),
    ("/rerank", {"documents": ["a", 5], "query": "q"}, "documents.1", "Input should be a valid string or an object"),
    ("/rerank", {"documents": ["a", ""], "query": "q"}, "documents.1", "String should have at least 1 character"),
    ("/score", {"queries": 5, "documents": "a"}, "queries", "Input should be a valid string or a valid list"),
    ("/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2.1", "Input should be a valid string"),
    ("/tokenize", {"messages": [], "tools": [{"function": {}}]}, "messages", "at least 1 item"),
    ("/tokenize", {"prompt": "a", "tools": [{"function": {}}]}, "tools.0.function.name", "Field required"),
    ("/tokenize", {"body": 1, "prompt": "a"}, "body", "unknown field"),
    ("/tokenize", {"query": 1, "prompt": "a"}, "query", "unknown field"),
    ("/tokenize", {}, None, "either prompt or messages is needed"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens.1", "Input should be a valid integer"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), FIELDS, ids=lambda value: str(value)[:40])
def test_the_field_that_is_wrong_is_named_as_the_client_knows_it(
    server: Any, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    error = refused(server.post(path, body))
    assert error["param"] == param
    assert message in error["message"]
    if param is not None:
        assert param in error["message"]
    for ours in ("constrained", "NamedTool", "Message", "instance", "literal["):
        assert ours not in error["message"] + str(error["param"])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e400}', "1e400"),
        (b'{"prompt": "a", "metadata": {"a": [-1e999]}}', "-1e999"),
        (b'{"tools": [{"function": {"name": "f", "parameters": {"maximum": 1.5E+400}}}]}', "1.5E+400"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        (b'{"prompt": "a", "stop": ["\\udc00"]}', "half of a character"),
        (b'{"prompt": "a", "\\ud800": 1}', "half of a character"),
        (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
        (b"[" * 100_000, "deep"),
        (b'{"a":' * 100_000, "deep"),
        (b'{"prompt": ' + b"[" * 80 + b"1" + b"]" * 80 + b"}", "deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too long"),
        (b'{"prompt": "a"} x', "not JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/score"])
def test_a_body_that_is_no_request(server: Any, path: str, content: bytes, named: str) -> None:
    assert named in refused(httpx.post(server.url + path, content=content, headers=JSON))["message"]


def test_a_body_must_say_that_it_is_json(server: Any) -> None:
    """A page of another origin can send text without asking the browser; JSON it cannot."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = httpx.post(
            server.url + "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind}
        )
        assert "application/json" in refused(response)["message"]


def test_a_body_that_is_too_large_is_413(serve: Any, tiny: Any) -> None:
    server = serve((tiny, "tiny"), max_request_bytes=2048)
    refused(server.post("/v1/completions", {"prompt": "a" * 5000}), 413)

    def chunks() -> Any:  # without a length that could be looked at
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 100

    refused(httpx.post(server.url + "/v1/completions", content=chunks(), headers=JSON), 413)
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_unknown_routes_and_methods_have_the_same_shape(server: Any) -> None:
    refused(server.get("/v1/nothing"), 404)
    refused(server.get("/v1/completions"), 405)
    refused(server.post("/v1/models", {}), 405)


def test_a_request_that_forbids_every_token_is_its_own_fault(server: Any) -> None:
    """The engine goes on, however often."""
    body = {**TEXT, "logit_bias": {str(i): -100 for i in range(256)}, "min_tokens": 2, "temperature": 0}
    for _ in range(5):
        response = server.post("/v1/completions", body)
        assert response.status_code in (200, 400), response.text
    assert server.get("/health").status_code == 200
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_tokens_of_tokenize_and_back(server: Any, offline: Any) -> None:
    answer = server.post("/tokenize", {"prompt": "The quick brown fox", "return_token_strs": True}).json()
    ids = offline.get_tokenizer()("The quick brown fox")["input_ids"]
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    bare = server.post("/tokenize", {"prompt": "The quick brown fox", "add_special_tokens": False}).json()["tokens"]
    assert bare == ids[1:]
    assert server.post("/detokenize", {"tokens": bare}).json() == {"prompt": "The quick brown fox"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    refused(server.post("/detokenize", {"tokens": [256]}))
    refused(server.post("/tokenize", {}))
    refused(server.post("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}))


def test_t2_a_prompt_of_megabytes_is_refused_without_encoding_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelbay.tokenizer.cached import CachedTokenizer

    given: list[int] = []
    original = CachedTokenizer._encode_plus

    def counted(self: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(len(text))
        return original(self, text, *args, **kwargs)

    monkeypatch.setattr(CachedTokenizer, "_encode_plus", counted)
    text = "a " * 1_000_000
    for path, body in (
        ("/v1/completions", {**TEXT, "prompt": text}),
        ("/v1/completions", {**TEXT, "prompt": ["a", text], "add_special_tokens": False}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
    ):
        error = refused(server.post(path, body))
        assert "the prompt has more than " in error["message"]
        assert "leave room for output" in error["message"]
    assert sum(given) < 400_000
