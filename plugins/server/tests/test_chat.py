"""/v1/chat/completions against the same model offline."""

from __future__ import annotations

from typing import Any

import pytest

from modelbay import LLM, SamplingParams

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick brown fox?"}]
GREEDY = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12}


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


# -- the template


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "return_dict", "no_such", "a b"])
def test_a_client_says_only_what_the_template_reads(server: Any, name: str) -> None:
    """Above all no template of its own, nor the path of a file."""
    body = {**GREEDY, "chat_template_kwargs": {name: "/etc/passwd"}}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    said = response.json()["error"]["message"]
    assert said.startswith("chat_template_kwargs: ")
    assert name in said
