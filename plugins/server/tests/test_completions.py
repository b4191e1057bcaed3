"""/v1/completions against the same model offline."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams

TEXT = "The quick brown fox"
GREEDY = {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 12}


def offline_text(offline: LLM, prompt: Any = TEXT, **params: Any) -> list[str]:
    [output] = offline.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return [sequence.text for sequence in output.outputs]


def test_an_answer_is_what_the_model_says_offline(server: Any, offline: LLM) -> None:
    answer = server.post("/v1/completions", GREEDY).json()
    [expected] = offline.generate(TEXT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    [choice] = answer["choices"]
    assert choice["text"] == expected.outputs[0].text
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    prompt = len(expected.prompt_token_ids)
    counted = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counted == {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}


def test_a_stream_joins_to_the_whole_answer(server: Any) -> None:
    whole = server.post("/v1/completions", GREEDY).json()
    *events, last = server.stream("/v1/completions", {**GREEDY, "stream_options": {"include_usage": True}})
    assert server.text(events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["finish_reason"]] == [
        "length"
    ]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
    assert all(event["usage"] is None for event in events)
    assert len({event["id"] for event in (*events, last)}) == 1


def test_sampling_with_a_seed_is_what_it_is_offline(server: Any, offline: LLM) -> None:
    given = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7, "n": 3,
             "max_tokens": 10, "min_tokens": 10, "presence_penalty": 0.3, "frequency_penalty": 0.1,
             "logit_bias": {"100": 2.0}, "stop_token_ids": [99], "ignore_eos": True, "bad_words": ["fox"]}  # fmt: skip
    answer = server.post("/v1/completions", {"prompt": TEXT, **given}).json()
    assert [choice["text"] for choice in answer["choices"]] == offline_text(offline, **given)
    streamed = server.stream("/v1/completions", {"prompt": TEXT, **given})
    assert [server.text(streamed, index) for index in range(3)] == offline_text(offline, **given)


def test_prompt_lists_of_texts_and_of_token_ids(server: Any, offline: LLM) -> None:
    ids = offline.get_tokenizer()(TEXT)["input_ids"]
    by_text = server.post("/v1/completions", {**GREEDY, "prompt": [TEXT, "Numbers 0 1"]}).json()
    by_ids = server.post("/v1/completions", {**GREEDY, "prompt": [ids, ids]}).json()
    one = server.post("/v1/completions", {**GREEDY, "prompt": ids, "return_token_ids": True}).json()["choices"][0]
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1]
    assert by_text["choices"][1]["text"] == offline_text(offline, "Numbers 0 1", temperature=0, max_tokens=12)[0]
    assert {choice["text"] for choice in by_ids["choices"]} == {by_text["choices"][0]["text"]} == {one["text"]}
    assert (one["prompt_token_ids"], len(one["token_ids"])) == (ids, 12)
    assert by_ids["usage"]["prompt_tokens"] == 2 * len(ids)


def test_choices_of_several_prompts_and_n_are_numbered_prompt_by_prompt(server: Any, offline: LLM) -> None:
    body = {"prompt": [TEXT, "Numbers"], "n": 2, "seed": 3, "max_tokens": 5}
    whole = server.post("/v1/completions", body).json()["choices"]
    expected = [text for prompt in body["prompt"] for text in offline_text(offline, prompt, n=2, seed=3, max_tokens=5)]  # type: ignore[attr-defined]
    assert [choice["text"] for choice in whole] == expected
    events = server.stream("/v1/completions", body)
    assert [server.text(events, index) for index in range(4)] == expected


def test_stop_strings_and_their_reason(server: Any) -> None:
    whole = server.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    stop = whole[5:7]
    choice = server.post("/v1/completions", {**GREEDY, "stop": ["never", stop]}).json()["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert server.text(server.stream("/v1/completions", {**GREEDY, "stop": stop})) == choice["text"]


def test_logprobs_are_those_of_the_engine(server: Any, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    [expected] = offline.generate(TEXT, params, use_tqdm=False)
    body = {**GREEDY, "max_tokens": 4, "logprobs": 3}
    shown = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    sequence = expected.outputs[0]
    chosen = [entries[token] for entries, token in zip(sequence.logprobs or [], sequence.token_ids, strict=True)]
    assert shown["tokens"] == [entry.decoded_token for entry in chosen]
    assert shown["token_logprobs"] == pytest.approx([entry.logprob for entry in chosen], abs=1e-5)
    assert all(
        max(top.values()) == value for top, value in zip(shown["top_logprobs"], shown["token_logprobs"], strict=True)
    )
    events = [event["choices"][0]["logprobs"] for event in server.stream("/v1/completions", body)]
    joined = {key: [item for event in events if event for item in event[key]] for key in shown}
    assert joined["tokens"] == shown["tokens"]
    assert joined["token_logprobs"] == pytest.approx(shown["token_logprobs"], abs=1e-5)


def test_echo_gives_the_prompt_with_its_logprobs(server: Any, offline: LLM) -> None:
    """What evaluation harnesses ask for: the log-likelihood of a prompt's own tokens."""
    ids = offline.get_tokenizer()(TEXT)["input_ids"]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [expected] = offline.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    body = {"prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    entries = (expected.prompt_logprobs or [])[1:]
    wanted = [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True) if entry]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-5)
    assert choice["text"].startswith("<s>" + TEXT)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets[-1] == len("<s>" + TEXT)


def test_max_tokens_0_with_echo_gives_the_prompt_alone(server: Any) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == TEXT
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    events = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert server.text(events) == TEXT
    assert events[-1]["usage"]["completion_tokens"] == 0


def test_an_echoed_stream_joins_to_the_whole(server: Any) -> None:
    body = {**GREEDY, "echo": True, "logprobs": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]
    events = server.stream("/v1/completions", body)
    assert (
        server.text(events)
        == whole["text"]
        == TEXT + server.post("/v1/completions", GREEDY).json()["choices"][0]["text"]
    )
    offsets = [
        at
        for event in events
        if event["choices"][0]["logprobs"]
        for at in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert all(earlier <= later for earlier, later in itertools.pairwise(offsets))
    assert len(offsets) == len(whole["logprobs"]["tokens"])


def test_usage_says_what_the_prefix_cache_had(server: Any) -> None:
    body = {"prompt": [1, *range(10, 90)], "max_tokens": 1, "temperature": 0}
    before = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    after = server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (before, after) == (0, 80)


def test_c10_what_a_request_does_not_say_is_the_models(serve: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 3}')
    server = serve((tiny, "tiny"), engine={"generation_config": str(tmp_path)})
    plain = server.post("/v1/completions", {"prompt": TEXT}).json()
    chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).json()
    greedy = server.post("/v1/completions", {**GREEDY, "max_tokens": 3}).json()
    assert plain["choices"][0]["text"] == greedy["choices"][0]["text"]
    assert chat["usage"]["completion_tokens"] <= 3
