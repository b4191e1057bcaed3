"""The openai packages for Python and Node, and curl, against SmolLM2."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from modelbay import LLM, SamplingParams
from modelbay_testing.assets import or_skip
from modelbay_testing.client_programs import node_client_dir, node_program

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCRIPT = Path(__file__).with_name("client.mjs")


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=120)


def answers(llm: LLM, **params: Any) -> list[Any]:
    """The choices of the model itself."""
    [output] = llm.chat(QUESTION, SamplingParams(**params), use_tqdm=False)
    return output.outputs


def test_chat_whole_and_streamed_with_usage(client: openai.OpenAI, real: LLM) -> None:
    [expected] = answers(real, temperature=0, max_tokens=24)
    said: Any = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**said)
    assert whole.choices[0].message.content == expected.text
    assert "Paris" in expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    chunks = list(client.chat.completions.create(**said, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == len(expected.token_ids)


def test_n_with_a_seed_and_stop(client: openai.OpenAI, real: LLM) -> None:
    expected = answers(real, n=3, seed=11, temperature=2.0, top_p=0.9, max_tokens=16, stop=[".", ","])
    said: Any = {"model": "smollm2", "messages": QUESTION, "n": 3, "seed": 11, "temperature": 2.0, "top_p": 0.9,
                 "max_tokens": 16, "stop": [".", ","]}  # fmt: skip
    whole = client.chat.completions.create(**said)
    assert [choice.message.content for choice in whole.choices] == [sequence.text for sequence in expected]
    assert len({sequence.text for sequence in expected}) > 1
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**said, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert list(texts.values()) == [sequence.text for sequence in expected]


def test_logprobs(client: openai.OpenAI, real: LLM) -> None:
    [expected] = answers(real, temperature=0, max_tokens=5, logprobs=3)
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert shown.content is not None
    for token, entries, token_id in zip(shown.content, expected.logprobs, expected.token_ids, strict=True):
        assert token.token == entries[token_id].decoded_token
        assert token.logprob == pytest.approx(entries[token_id].logprob, abs=1e-4)
        assert len(token.top_logprobs) == 3
        assert math.fsum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001


class Person(BaseModel):
    name: Literal["Ann", "Bo"]
    age: int = Field(ge=1, le=99)


def test_a_pydantic_model_comes_back_as_one(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=Person, temperature=1.0, seed=5, max_tokens=60
    )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert 1 <= person.age <= 99


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_a_tool_is_called(client: openai.OpenAI, weather: Any, choice: Any, stream: bool) -> None:
    said: Any = {"model": "smollm2", "messages": QUESTION, "tools": [weather], "tool_choice": choice, "temperature": 0,
                 "parallel_tool_calls": False, "max_tokens": 80}  # fmt: skip
    if stream:
        with client.chat.completions.stream(**said) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**said).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert message.content is None
    told: Any = [*QUESTION, message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]  # fmt: skip
    again = client.chat.completions.create(model="smollm2", messages=told, tools=[weather], max_tokens=4)
    assert again.choices[0].message.content is not None


def test_a_model_may_call_a_tool_by_itself(client: openai.OpenAI, real: LLM, weather: Any) -> None:
    [output] = real.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40), tools=[weather], use_tqdm=False)
    said: Any = {"model": "smollm2", "messages": QUESTION, "tools": [weather], "temperature": 0, "max_tokens": 40}
    message = client.chat.completions.create(**said).choices[0].message
    assert message.content == output.outputs[0].text or message.tool_calls


def test_completions_of_several_prompts(client: openai.OpenAI, real: LLM) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    expected = real.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    answer = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=8)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    """Case 39. Python's client asks for base64 unless it is told otherwise."""
    packed = client.embeddings.create(model="minilm", input=["A cat", "A dog"])
    plain = client.embeddings.create(model="minilm", input=["A cat", "A dog"], encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert len(one.embedding) == 384


def test_errors_are_the_packages_own(client: openai.OpenAI) -> None:
    """Case 40."""
    with pytest.raises(openai.NotFoundError, match="'smollm2', 'minilm'"):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="minilm"):
        client.chat.completions.create(model="minilm", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="smollm2", prompt=[5] * 9000, stream=True)


def test_the_package_for_node(base_url: str, real: LLM, weather: Any, client: openai.OpenAI) -> None:
    folder, node = or_skip(node_client_dir), or_skip(node_program)
    shutil.copyfile(SCRIPT, folder / SCRIPT.name)
    given = json.dumps({"baseURL": base_url, "messages": QUESTION, "tool": weather})
    done = subprocess.run(
        [node, SCRIPT.name, given], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    [expected] = answers(real, temperature=0, max_tokens=12)
    assert got["models"] == ["smollm2", "minilm"]
    assert got["whole"] == got["streamed"] == expected.text
    assert got["usage"]["completion_tokens"] == len(expected.token_ids)
    assert json.loads(got["person"])["name"] in ("Ann", "Bo")
    assert got["call"]["name"] == "get_weather"
    assert set(json.loads(got["call"]["arguments"])) == {"city", "unit"}
    vector = client.embeddings.create(model="minilm", input="A cat", encoding_format="float").data[0].embedding
    assert got["embedding"] == pytest.approx(vector, abs=1e-6)
    assert got["error"] == {"status": 404, "code": "model_not_found"}
    assert got["aborted"] is True


def test_curl(base_url: str, real: LLM) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    [expected] = answers(real, temperature=0, max_tokens=8)

    def curl(path: str, *more: str, **body: Any) -> str:
        command = [program, "--silent", "--show-error", "--fail-with-body", "--no-buffer", "--max-time", "60",
                   base_url + path, "-H", "Content-Type: application/json", "-d", json.dumps(body), *more]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    said = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    whole = json.loads(curl("/chat/completions", **said))
    assert whole["choices"][0]["message"]["content"] == expected.text
    lines = [line for line in curl("/chat/completions", **said, stream=True).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == expected.text
    refused = curl("/chat/completions", "-w", "\n%{http_code}", **{**said, "temperature": -1})
    assert refused.splitlines()[-1] == "400"
