"""Embeddings, reranking and scores, with a real encoder, against the same model offline."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from modelbay import LLM, PoolingParams
from modelbay_testing.assets import minilm_dir, or_skip

TEXTS = ["A man is eating food.", "A plane is taking off.", "Someone eats."]


@pytest.fixture(scope="module")
def encoder() -> Path:
    return Path(or_skip(minilm_dir))


@pytest.fixture(scope="module")
def minilm(encoder: Path, serving_in_module: Callable[..., Any]) -> Iterator[Any]:
    with serving_in_module((encoder, "minilm")) as server:
        yield server


@pytest.fixture(scope="module")
def llm(encoder: Path) -> Iterator[LLM]:
    with LLM(str(encoder), dtype="float32", device="cpu") as llm:
        yield llm


def near(left: Any, right: Any) -> None:
    assert list(left) == pytest.approx(list(right), abs=1e-5)


def test_case_39_embeddings_as_floats_and_as_base64(minilm: Any, llm: LLM) -> None:
    expected = [output.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    answer = minilm.post("/v1/embeddings", {"model": "minilm", "input": TEXTS}).json()
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    for item, vector in zip(answer["data"], expected, strict=True):
        near(item["embedding"], vector)
    packed = minilm.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()
    for item, vector in zip(packed["data"], expected, strict=True):
        content = base64.b64decode(item["embedding"])
        assert len(content) == 4 * len(vector)
        near(array("f", content), vector)
    ids = llm.get_tokenizer()(TEXTS)["input_ids"]
    assert answer["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    by_ids = minilm.post("/v1/embeddings", {"input": ids[0]}).json()
    near(by_ids["data"][0]["embedding"], expected[0])


def test_the_openai_client_unpacks_what_it_asks_for(minilm: Any, llm: LLM) -> None:
    """It asks for base64 by itself."""
    client = openai.OpenAI(base_url=minilm.url + "/v1", api_key="unused", max_retries=0)
    [expected] = llm.embed(TEXTS[0], use_tqdm=False)
    near(client.embeddings.create(model="minilm", input=TEXTS[0]).data[0].embedding, expected.embedding)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="minilm", input=[])


def test_dimensions_are_cut_before_the_length_is_1(minilm: Any, llm: LLM) -> None:
    [whole] = llm.embed(TEXTS[0], PoolingParams(dimensions=8), use_tqdm=False)
    vector = minilm.post("/v1/embeddings", {"input": TEXTS[0], "dimensions": 8}).json()["data"][0]["embedding"]
    near(vector, whole.embedding)
    assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)


def test_rerank_and_score_are_the_models_own(minilm: Any, llm: LLM) -> None:
    expected = [output.score for output in llm.score("Who eats?", TEXTS, use_tqdm=False)]
    order = sorted(range(3), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = minilm.post(path, {"model": "minilm", "query": "Who eats?", "documents": TEXTS}).json()
        assert [result["index"] for result in answer["results"]] == order
        near([result["relevance_score"] for result in answer["results"]], [expected[index] for index in order])
        assert answer["results"][0]["document"]["text"] == TEXTS[order[0]]
    best = {
        "query": "Who eats?",
        "documents": [{"text": text} for text in TEXTS],
        "top_n": 1,
        "return_documents": False,
    }
    [result] = minilm.post("/rerank", best).json()["results"]
    assert result == {"index": order[0], "relevance_score": pytest.approx(expected[order[0]], abs=1e-5)}
    for path in ("/score", "/v1/score"):
        scores = minilm.post(path, {"text_1": "Who eats?", "text_2": TEXTS}).json()["data"]
        near([item["score"] for item in scores], expected)
    pairs = minilm.post("/score", {"text_1": TEXTS, "text_2": TEXTS}).json()["data"]
    near([item["score"] for item in pairs], [1, 1, 1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", 5]}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
        ("/v1/embeddings", {"input": "a", "prompt_name": "no such"}),
        ("/v1/embeddings", {"input": "food " * 3000}),
        ("/v1/embeddings", {"input": [10**6]}),
        ("/rerank", {"query": "", "documents": ["a"]}),
        ("/rerank", {"query": "a", "documents": []}),
        ("/rerank", {"query": "a", "documents": [{"no": "text"}]}),
        ("/rerank", {"query": "a", "documents": [5]}),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
        ("/score", {"text_1": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_what_cannot_be_pooled_is_400(minilm: Any, path: str, body: dict[str, Any]) -> None:
    response = minilm.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_nothing_is_left_of_them(minilm: Any) -> None:
    minilm.wait_until_idle()
    assert minilm.get("/metrics").status_code == 200
