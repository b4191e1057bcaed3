"""LangChain's classes for OpenAI, the command `llm`, and lm-evaluation-harness, in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay_testing.assets import or_skip
from modelbay_testing.client_programs import clients_python
from modelbay_testing.serve_process import ServeProcess

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

QUESTION, PROMPT = "What is the capital of France?", "The capital of France is"
TEXTS = ["A cat sleeps", "The stock market"]


@pytest.fixture(scope="module")
def python() -> Path:
    return or_skip(clients_python)


def run(python: Path, *words: str, cwd: Path, **environ: str) -> str:
    """Standard output. Nothing of what runs here may look for a hub or report to anybody."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTEST_"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "hf"), "DO_NOT_TRACK": "1", **environ}
    done = subprocess.run(
        [str(python), *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def chat_text(llm: LLM, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    [output] = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    return output.outputs[0].text


# -- LangChain


def test_langchain(python: Path, base_url: str, real: LLM, tmp_path: Path) -> None:
    given = {"base_url": base_url, "question": QUESTION, "prompt": PROMPT, "texts": TEXTS}
    script = Path(__file__).with_name("langchain_client.py")
    got = json.loads(run(python, str(script), json.dumps(given), cwd=tmp_path))
    expected = chat_text(real, 12)
    assert got["whole"] == got["streamed"] == expected
    assert got["batch"] == [expected] * 3
    assert got["usage"]["output_tokens"] == len(real.get_tokenizer().encode(expected)) + 1  # and the one that ends it
    assert got["logprobs"] == 3
    for name in ("json_schema", "function_calling", "call", "streamed_call"):
        assert len(got[name]["city"]) <= 20
        assert 1 <= got[name]["days"] <= 14, name
    assert got["after_call"]
    [output] = real.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert got["completion"] == got["completion_streamed"] == got["generations"][0] == output.outputs[0].text
    assert [len(vector) for vector in got["vectors"]] == [384, 384]
    assert got["query"] == pytest.approx(got["vectors"][0], abs=1e-5)


# -- llm


def test_llm_the_command(python: Path, served: ServeProcess, real: LLM, tmp_path: Path) -> None:
    models = [{"model_id": "small", "model_name": "smollm2", "api_base": f"{served.url}/v1", "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")

    def llm(*words: str) -> str:
        options = ("-m", "small", "-o", "temperature", "0", "-o", "max_tokens")
        return run(python, "-m", "llm", *words, *options, "40", cwd=tmp_path, LLM_USER_PATH=str(tmp_path)).strip()

    assert llm(QUESTION) == llm(QUESTION, "--no-stream") == chat_text(real, 40)
    schema = json.dumps({
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False,
    })  # fmt: skip
    assert json.loads(llm(QUESTION, "--schema", schema))["city"] in ("Paris", "Rome")


# -- lm-evaluation-harness

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "the Atlantic Ocean", "seven"], "answer": 0},
    {"question": "One, two, three,", "choices": ["banana", "four", "purple elephants"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["cold", "Thursday", "to run"], "answer": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "metadata": {"version": 1}}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks on a file of questions: one is scored by log-probabilities, one by what is generated."""
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    common = {**COMMON, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    made = {
        "choices": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
                    "metric_list": [{"metric": "acc"}]},
        "words": {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
                  "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
                  "metric_list": [{"metric": "exact_match"}]},
    }  # fmt: skip
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, task in made.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}), encoding="utf-8")
    return folder


def test_lm_evaluation_harness(
    python: Path, base_url: str, real: LLM, smollm2: Path, tasks: Path, tmp_path: Path
) -> None:
    arguments = f"model=smollm2,base_url={base_url}/completions,tokenizer={smollm2},num_concurrent=3,max_length=512"
    run(python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks",
        "choices,words", "--include_path", str(tasks), "--output_path", str(tmp_path / "out"), "--log_samples",
        cwd=tmp_path)  # fmt: skip
    for sample in samples(tmp_path, "choices"):
        doc = sample["doc"]
        for choice, [[logprob, greedy]] in zip(doc["choices"], sample["resps"], strict=True):
            expected, is_greedy = continuation(real, doc["question"], f" {choice}")
            assert float(logprob) == pytest.approx(expected, abs=2e-3)
            assert str(greedy) == str(is_greedy)
    texts = [sample["resps"][0][0] for sample in samples(tmp_path, "words")]
    params = SamplingParams(temperature=0, max_tokens=8, stop=["\n", "."])
    expected_texts = real.generate([doc["question"] for doc in QUESTIONS], params, use_tqdm=False)
    assert texts == [output.outputs[0].text for output in expected_texts]
    [results] = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["choices"]["acc,none"] == 1.0


def samples(folder: Path, task: str) -> list[Any]:
    [path] = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def continuation(llm: LLM, context: str, choice: str) -> tuple[float, bool]:
    """The log-probability of a text after another, and whether it is what the model would say."""
    tokenizer = llm.get_tokenizer()
    ids: Sequence[int] = tokenizer.encode(context + choice)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [output] = llm.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    start = len(tokenizer.encode(context))
    positions: list[Any] = list(zip(ids[start:], output.prompt_logprobs[start:], strict=True))
    likeliest = all(each[token].rank == 1 for token, each in positions)
    return sum(each[token].logprob for token, each in positions), likeliest
