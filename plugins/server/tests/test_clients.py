"""Clients that exist: the openai package and curl."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from typing import Any

import openai
import pytest

from modelbay import LLM, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "The quick brown fox?"}]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "modelbay"


def test_openai_chat(client: openai.OpenAI, offline: LLM) -> None:
    [expected] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=9)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_openai_chat_streamed_with_usage_and_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    [expected] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=9, stream=True, logprobs=True, top_logprobs=2,
        stream_options={"include_usage": True}, extra_body={"top_k": 5, "min_p": 0.0},
    )  # fmt: skip
    text, tokens, usage = "", 0, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += len((choice.logprobs and choice.logprobs.content) or ())
    assert text == expected.outputs[0].text
    assert usage is not None
    assert tokens == usage.completion_tokens == 9


def test_openai_completions(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=6, n=2, temperature=0.8)
    [expected] = offline.generate("Numbers", params, use_tqdm=False)
    answer = client.completions.create(model="tiny", prompt="Numbers", seed=4, max_tokens=6, n=2, temperature=0.8)
    assert [choice.text for choice in answer.choices] == [sequence.text for sequence in expected.outputs]


def test_openai_errors_are_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="tiny", prompt=[1] * 600)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert raised.value.type == "invalid_request_error"


def curl(server: Any, path: str, body: Any, *more: str) -> str:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    command = [program, "--silent", "--show-error", "--no-buffer", "--max-time", "60", server.url + path,
               "-H", "Content-Type: application/json", "-d", json.dumps(body), *more]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_curl(server: Any, offline: LLM) -> None:
    body = {"model": "tiny", "prompt": "The quick", "temperature": 0, "max_tokens": 5}
    [expected] = offline.generate("The quick", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert json.loads(curl(server, "/v1/completions", body))["choices"][0]["text"] == expected.outputs[0].text
    shown = curl(server, "/v1/completions", {**body, "stream": True}).splitlines()
    assert shown[-2:] == ["data: [DONE]", ""] or shown[-1] == "data: [DONE]"
    assert shown[0].startswith("data: {")
    status = curl(server, "/v1/completions", {"prompt": 5}, "-o", "-", "-w", "\n%{http_code}").splitlines()[-1]
    assert status == "400"


def test_base64_is_what_openai_unpacks() -> None:
    """Case 39: little-endian float32, four bytes a number."""
    from array import array

    from modelbay_server.routes.embeddings import _encoded

    vector = [0.5, -1.25, 3.0]
    packed = base64.b64decode(_encoded(vector, "base64"))
    assert len(packed) == 4 * len(vector)
    assert array("f", packed).tolist() == vector
    assert _encoded(vector, "float") == vector
