"""/v1/chat/completions against the same model offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay_server.answers.chat import ChatAnswer
from modelbay_server.answers.tool_calls import CallsInStream, read_calls
from modelbay_server.schemas.chat import ChatBody

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox?"}]
GREEDY = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tool_checkpoint(
    checkpoint: Callable[..., Path], tool_template: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:

    path = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(checkpoint("llama"), path)
    for file in path.glob("chat_template*"):
        file.unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": tool_template}))
    return path


def test_an_answer_is_what_the_model_says_offline(server: Any, offline: LLM) -> None:
    [expected] = offline.chat(HELLO, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = server.post("/v1/chat/completions", GREEDY).json()
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == expected.outputs[0].finish_reason
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["object"] == "chat.completion"


def test_a_stream_begins_with_the_role_and_joins_to_the_whole(server: Any) -> None:
    whole = server.post("/v1/chat/completions", GREEDY).json()
    body = {**GREEDY, "stream_options": {"include_usage": True}}
    *events, last = server.stream("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert server.text(events) == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == whole["choices"][0]["finish_reason"]
    assert {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


def test_n_choices_with_a_seed_are_those_offline(server: Any, offline: LLM) -> None:
    [expected] = offline.chat(HELLO, SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False)
    body = {"messages": HELLO, "n": 3, "seed": 5, "max_completion_tokens": 8}
    whole = server.post("/v1/chat/completions", body).json()["choices"]
    events = server.stream("/v1/chat/completions", body)
    texts = [sequence.text for sequence in expected.outputs]
    assert [choice["message"]["content"] for choice in whole] == texts
    assert [server.text(events, index) for index in range(3)] == texts


def test_without_a_limit_the_answer_may_fill_the_context(server: Any) -> None:
    body = {"messages": HELLO, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_logprobs(server: Any, offline: LLM) -> None:
    [expected] = offline.chat(HELLO, SamplingParams(temperature=0, max_tokens=3, logprobs=2), use_tqdm=False)
    body = {**GREEDY, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    sequence = expected.outputs[0]
    for shown, entries, token in zip(content, sequence.logprobs or [], sequence.token_ids, strict=True):
        assert shown["token"] == entries[token].decoded_token
        assert shown["logprob"] == pytest.approx(entries[token].logprob, abs=1e-5)
        assert bytes(shown["bytes"]).decode() == shown["token"]
        likeliest = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
        assert [top["logprob"] for top in shown["top_logprobs"]] == pytest.approx(likeliest, abs=1e-5)
    events = server.stream("/v1/chat/completions", body)
    streamed = [item for e in events for item in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [item["token"] for item in streamed] == [item["token"] for item in content]


def test_parts_of_text_are_one_text(server: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "The quick"}, {"type": "text", "text": "fox"}]}]
    joined = [{"role": "user", "content": "The quick\nfox"}]
    answers = [server.post("/v1/chat/completions", {**GREEDY, "messages": m}).json() for m in (parts, joined)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_continue_final_message(server: Any, offline: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The lazy"}]
    params = SamplingParams(temperature=0, max_tokens=12)
    [expected] = offline.chat(messages, params, continue_final_message=True, use_tqdm=False)
    body = {**GREEDY, "messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == expected.outputs[0].text


# -- tools and the template


def test_tools_that_the_template_passes_over_are_refused(server: Any) -> None:
    response = server.post("/v1/chat/completions", {**GREEDY, "tools": [WEATHER]})
    assert response.status_code == 400
    assert "no place for them" in response.json()["error"]["message"]
    assert server.post("/v1/chat/completions", {**GREEDY, "tools": [WEATHER], "tool_choice": "none"}).status_code == 200


def test_tools_and_variables_reach_the_template(serve: Callable[..., Any], tool_checkpoint: Path) -> None:
    server = serve((tool_checkpoint, "tools"))

    def rendered(**more: Any) -> str:
        ids = server.post("/tokenize", {"messages": HELLO, **more}).json()["tokens"]
        return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])

    assert "tools: weather <tool_call>" in rendered(tools=[WEATHER])
    assert "LOUD" in rendered(chat_template_kwargs={"shout": True})
    assert "LOUD" not in rendered()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    assert "Bonn" in rendered(messages=[*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER], "max_tokens": 4})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "return_dict", "no_such", "a b"])
def test_a_client_says_only_what_the_template_reads(server: Any, name: str) -> None:
    """Above all no template of its own, nor the path of a file."""
    body = {**GREEDY, "chat_template_kwargs": {name: "/etc/passwd"}}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "no variable" in response.json()["error"]["message"]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("Hello", "Hello", []),
        (CALL, "", ["weather"]),
        (f"Let me see. {CALL}\n{CALL}", "Let me see.", ["weather", "weather"]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (CALL.removesuffix("\n</tool_call>"), "", ["weather"]),
        ("a < b and <tool", "a < b and <tool", []),
    ],
)
def test_calls_are_read_the_same_whole_and_in_pieces(text: str, content: str, names: list[str]) -> None:
    shown, calls = read_calls(text)
    assert (shown, [call["function"]["name"] for call in calls]) == (content, names)
    assert all(json.loads(call["function"]["arguments"]) == {"city": "Bonn"} for call in calls)
    for size in (1, 3, 7):
        stream = CallsInStream()
        pieces = [stream.text(text[at : at + size]) for at in range(0, len(text), size)]
        rest, streamed = stream.finish()
        assert ("".join(pieces) + rest).rstrip() == content.rstrip()
        assert [call["function"]["name"] for call in streamed] == names


def test_a_called_tool_ends_the_choice_as_such(tool_template: str) -> None:
    """The tiny model writes no calls, so its words are put into its mouth: the whole way but the logits."""
    tokenizer = SimpleNamespace(chat_template=tool_template)
    model: Any = SimpleNamespace(name="tools", tokenizer=tokenizer)
    answer = ChatAnswer(ChatBody.model_validate({**GREEDY, "tools": [WEATHER]}), model)
    sequence = SimpleNamespace(
        index=0, text=f"Wait. {CALL}", token_ids=[1, 2], logprobs=None, finish_reason="stop", stop_reason=None
    )
    output = SimpleNamespace(prompt_token_ids=[1], outputs=[sequence], metrics=None, prompt_logprobs=None)
    choice = answer.whole([output])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
