"""Answers with much in them: bounded before anything is computed, and made where they hold nobody up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay_server import streaming
from modelbay_server.answers import json_text
from modelbay_server.answers.json_text import json_bytes
from modelbay_server.command import command
from modelbay_server.settings import ServerSettings

HELLO = [{"role": "user", "content": "x"}]
HUGE: dict[str, Any] = {"prompt": ["x y z " * 60] * 6, "n": 128, "max_tokens": 1, "prompt_logprobs": 20}


@pytest.fixture(scope="module")
def small_server(tiny: Path, serving_in_module: Callable[..., Any]) -> Iterator[Any]:
    """A server whose answers hold 200 entries."""
    with serving_in_module((tiny, "tiny"), max_answer_entries=200) as server:
        yield server


def refusal(server: Any, path: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 400, response.text[:200]
    return str(response.json()["error"]["message"])


# -- the bound


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_would_be_huge_is_refused_with_the_arithmetic(server: Any, stream: bool) -> None:
    echo = {"prompt_logprobs": None, "echo": True, "logprobs": 20, "stream": True}
    message = refusal(server, "/v1/completions", HUGE | (echo if stream else {}))
    tokens = 6 * len(server.post("/tokenize", {"prompt": HUGE["prompt"][0]}).json()["tokens"])
    each, output = (22, 21) if stream else (21, 0)
    assert f"n = 128, times ({tokens:,} tokens of prompts x {each} each + up to 6 tokens of output" in message
    assert f"{128 * (tokens * each + 6 * output):,}" in message
    assert "2,000,000" in message
    assert "--max-answer-entries" in message
    server.wait_until_idle()


#: Requests, and whether they may need more than 200 entries. "x" has two tokens.
SIZES: list[tuple[dict[str, Any], bool]] = [
    ({"max_tokens": 400}, False),
    ({"max_tokens": 100, "logprobs": 1}, False),
    ({"max_tokens": 101, "logprobs": 1}, True),
    ({"max_tokens": 51, "logprobs": 0, "n": 4}, True),
    ({"max_tokens": 50, "logprobs": 0, "n": 4}, False),
    ({"max_tokens": 1, "prompt_logprobs": 9, "n": 10}, False),
    ({"max_tokens": 1, "prompt_logprobs": 9, "n": 11}, True),
    ({"max_tokens": 1, "prompt_logprobs": 9, "prompt": ["x"] * 11}, True),
    ({"max_tokens": 99, "return_token_ids": True, "n": 2}, True),
    ({"max_tokens": 98, "return_token_ids": True, "n": 2}, False),
    ({"max_tokens": 0, "echo": True, "logprobs": 0, "n": 50}, False),
    ({"max_tokens": 0, "echo": True, "logprobs": 0, "n": 51}, True),
    ({"max_tokens": 0, "echo": True, "n": 101}, True),
    ({"max_tokens": 1, "prompt_logprobs": 20, "truncate_prompt_tokens": 4, "prompt": "x " * 100}, False),
]


@pytest.mark.parametrize(("asked", "too_much"), SIZES, ids=str)
def test_what_counts(small_server: Any, asked: dict[str, Any], too_much: bool) -> None:
    body = {"prompt": "x", "seed": 1, **asked}
    if too_much:
        assert "200 are the most" in refusal(small_server, "/v1/completions", body)
    else:
        assert small_server.post("/v1/completions", body).status_code == 200
    if "prompt_logprobs" not in asked:
        response = small_server.post("/v1/completions", {**body, "stream": True})
        assert response.status_code == (400 if too_much else 200)


@pytest.mark.parametrize("n", [1, 3])
def test_where_nothing_else_limits_an_answer_the_bound_does(small_server: Any, n: int) -> None:
    """A chat without max_tokens may fill the context, and hardly ever does."""
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, "ignore_eos": True, "n": n}
    choices = small_server.post("/v1/chat/completions", body).json()["choices"]
    for choice in choices:
        assert (len(choice["logprobs"]["content"]), choice["finish_reason"]) == (100 // n, "length")
    assert "200 are" in refusal(small_server, "/v1/chat/completions", {**body, "n": 101})
    assert "200 are" in refusal(small_server, "/v1/chat/completions", {**body, "min_tokens": 101})
    assert "200 are" in refusal(small_server, "/v1/chat/completions", {**body, "max_tokens": 101})


def test_a_chat_of_text_alone_is_not_cut(small_server: Any) -> None:
    """The bound is not about it."""
    [choice] = small_server.post("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True}).json()["choices"]
    used = small_server.post("/tokenize", {"messages": HELLO}).json()
    answer = small_server.post("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True}).json()
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == used["max_model_len"] - used["count"] > 200


def test_c10_the_models_own_limit_counts(serve: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 150}')
    server = serve((tiny, "tiny"), engine={"generation_config": str(tmp_path)}, max_answer_entries=200)
    body = {"prompt": "x", "logprobs": 1}
    assert "up to 150 tokens" in refusal(server, "/v1/completions", body)
    assert "up to 150 tokens" in refusal(server, "/v1/chat/completions",
                                         {"messages": HELLO, "logprobs": True, "top_logprobs": 1})  # fmt: skip
    assert server.post("/v1/completions", {**body, "logprobs": 0}).status_code == 200


def test_the_bound_is_an_option() -> None:
    [option] = [each for each in command.params if each.name == "max_answer_entries"]
    assert option.default == ServerSettings().max_answer_entries == 2_000_000


# -- prompt_logprobs in a stream


@pytest.mark.parametrize("k", [0, 5])
def test_prompt_logprobs_are_not_passed_over_in_a_stream(server: Any, k: int) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        asked = {**body, "max_tokens": 1, "prompt_logprobs": k}
        assert "stream" in refusal(server, path, {**asked, "stream": True})
        assert "prompt_logprobs" in server.post(path, asked).text


# -- where they are made

LARGE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x y z " * 60, "n": 4, "max_tokens": 2, "prompt_logprobs": 20}),
    ("/v1/completions", {"prompt": ["x y z " * 60], "n": 2, "max_tokens": 2, "logprobs": 20, "echo": True}),
    ("/v1/completions", {"prompt": "x", "n": 8, "max_tokens": 300, "return_token_ids": True, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 200, "logprobs": True, "top_logprobs": 20,
                              "ignore_eos": True}),
]  # fmt: skip


@pytest.fixture
def written_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Longest piece of JSON that a thread of this name wrote at once."""
    longest: dict[str, int] = {}
    dump = json_text.short_json

    def watched(value: Any) -> bytes:
        name = threading.current_thread().name.split("_")[0]
        text = dump(value)
        longest[name] = max(len(text), longest.get(name, 0))
        return text

    for module in (json_text, streaming):
        monkeypatch.setattr(module, "short_json", watched)
    return longest


@pytest.mark.parametrize(("path", "asked"), LARGE)
def test_large_answers_are_written_beside_the_event_loop(
    server: Any, written_by: dict[str, int], path: str, asked: dict[str, Any]
) -> None:
    body = {**asked, "seed": 1}
    large = server.post(path, body)
    assert len(large.content) > 10_000
    assert set(written_by) == {"answer"}
    assert written_by["answer"] < 500_000
    assert large.headers["content-type"] == "application/json"
    server.post(path, {**body, "max_tokens": 1, "logprobs": None, "top_logprobs": None, "echo": None, "n": 1,
                       "prompt_logprobs": None})  # fmt: skip
    assert len(written_by) == 2


def test_large_embeddings_are_written_beside_the_event_loop(
    serve: Callable[..., Any], tiny: Path, written_by: dict[str, int]
) -> None:
    server = serve((tiny, "tiny"), engine={"convert": "embed"})
    texts = [f"number {number}" for number in range(40)]
    data = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    assert [len(each["embedding"]) for each in data] == [64] * 40
    assert set(written_by) == {"answer"}


@pytest.mark.parametrize("echo", [False, True])
def test_large_pieces_of_streams_are_written_beside_the_event_loop(
    server: Any, written_by: dict[str, int], echo: bool
) -> None:
    """The prompt's log-probabilities in the first piece; or many tokens at once, for a client that reads slowly."""
    prompt = "x y z " * 60
    body = {"prompt": prompt if echo else "x", "echo": echo, "logprobs": 20, "max_tokens": 200, "ignore_eos": True,
            "temperature": 0}  # fmt: skip
    whole = server.post("/v1/completions", body).json()["choices"][0]
    written_by.clear()
    events = server.stream("/v1/completions", body)
    shown = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    for key in ("tokens", "text_offset"):
        assert [item for each in shown for item in each[key]] == whole["logprobs"][key]
    threads = set(written_by) - {"answer"}
    assert len(threads) == 1
    assert ("answer" in written_by) is echo
    assert written_by[threads.pop()] < 200_000


async def beside(fn: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(fn)


def test_an_event_is_the_same_wherever_it_is_made() -> None:
    data = {"choices": [{"logprobs": {"content": [{"x": "é\u2028"}] * 300}}]}
    inline = asyncio.run(streaming.made(1, lambda: data, beside))
    written = asyncio.run(streaming.made(streaming.INLINE + 1, lambda: data, beside))
    assert (inline, written) == (data, streaming.event(data))
    assert asyncio.run(streaming.made(streaming.INLINE + 1, lambda: None, beside)) is None


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 300, 1000])
def test_json_in_runs_is_json(size: int) -> None:
    long = [{"a": number, "b": [None, "é\ud800"]} for number in range(size)]
    value = {"choices": [{"x": long, "y": {"z": long, "w": {}}, "t": [[]] * size}, {"x": long}], "n": [], "f": 0.1}
    expected = json.loads(json.dumps(value).replace("\\ud800", "\\ufffd"))
    assert json.loads(json_bytes(value)) == expected
    for inner in (long, [long], {"x": 5}, 5, None, "a"):
        assert json.loads(json_bytes(inner)) == json.loads(json.dumps(inner).replace("\\ud800", "\\ufffd"))


def test_what_choices_share_is_made_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelbay_server.answers import completions

    made: list[int] = []
    shape = completions.prompt_logprobs

    def counted(given: Any) -> Any:
        made.append(len(given))
        return shape(given)

    monkeypatch.setattr(completions, "prompt_logprobs", counted)
    body = {"prompt": ["x", "y z"], "n": 5, "max_tokens": 1, "prompt_logprobs": 2}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert len(made) == 2
    assert all(len(choice["prompt_logprobs"]) in made for choice in choices)
