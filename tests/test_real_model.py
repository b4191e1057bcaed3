"""The real model: SmolLM2-135M-Instruct as Llama, relabelled as Qwen2, and as the GGUF file that people download."""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM, SamplingParams
from modelbay_testing.assets import or_skip, smollm2_as_qwen2_dir, smollm2_dir, smollm2_gguf
from modelbay_testing.recording import Reference, record_logits

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("one_thread")]

TOLERANCE = 2e-3
NEW_TOKENS = 64
LENGTHS = (5, 12, 33, 64, 100, 200, 350, 600)
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
CHUNKED, WHOLE = {"max_num_batched_tokens": 128}, {"enable_chunked_prefill": False}
CHECKPOINTS: dict[str, Callable[[str], Path]] = {"llama": smollm2_dir, "qwen2": smollm2_as_qwen2_dir}


@pytest.fixture(scope="module")
def text(root: Path) -> list[int]:
    """Token ids of English prose and a little code: the licence, and what Python says about itself."""
    from transformers import AutoTokenizer

    docs = [
        inspect.getdoc(thing) or "" for thing in (statistics, inspect, int, str, dict, statistics.NormalDist, print)
    ]
    prose = "\n\n".join([(root / "LICENSE").read_text(encoding="utf-8")[1500:8000], *docs])
    ids = AutoTokenizer.from_pretrained(or_skip(smollm2_dir, "float32"))(prose)["input_ids"]
    assert len(ids) > 2100
    return ids


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[dict[str, list[int]]]:
    """Eight prompts of 5 to 600 tokens from different places."""
    return [{"prompt_token_ids": text[97 * i : 97 * i + length]} for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference_of() -> Callable[[str], Reference]:
    """``reference_of("llama")``: Transformers in float32, loaded once."""
    return cache(lambda family: Reference(or_skip(CHECKPOINTS[family], "float32")))


@pytest.fixture(scope="module")
def expected_logits(reference_of: Callable[[str], Reference]) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """Transformers' logits [T, V] of these tokens, computed once."""
    return cache(lambda family, token_ids: reference_of(family).logits(token_ids))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", CHUNKED, id="llama-chunked"),
        pytest.param("qwen2", WHOLE, id="qwen2-whole"),
        pytest.param("llama", WHOLE, id="llama-whole", marks=pytest.mark.deep),
        pytest.param("qwen2", CHUNKED, id="qwen2-chunked", marks=pytest.mark.deep),
    ],
)
def test_logits_and_64_greedy_tokens_are_those_of_transformers(
    family: str,
    options: dict[str, Any],
    expected_logits: Callable[[str, tuple[int, ...]], torch.Tensor],
    prompts: list[Any],
) -> None:
    """All prompts in one batch, then again with the prefix cache's hits: every row of every step."""
    path = or_skip(CHECKPOINTS[family], "float32")
    with LLM(str(path), dtype="float32", max_model_len=1024, max_num_seqs=8, **options) as llm:
        for hit in (False, True):
            with record_logits(llm) as recording:
                outputs = llm.generate(prompts, GREEDY)
            for output, length in zip(outputs, LENGTHS, strict=True):
                tokens = (*output.prompt_token_ids, *output.outputs[0].token_ids)
                logits = expected_logits(family, tokens)
                # Each token is Transformers' likeliest after those before it: so is the whole continuation.
                assert list(tokens[length:]) == logits[length - 1 : -1].argmax(-1).tolist()
                cached = output.metrics.num_cached_tokens
                assert cached == ((length - 1) // 16 * 16 if hit else 0)
                assert recording.positions(output.request_id) == list(range(cached, length + NEW_TOKENS - 1))
                assert recording.worst_difference(output.request_id, logits) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 2), pytest.param("llama", 8, marks=pytest.mark.deep), pytest.param("qwen2", 8, marks=pytest.mark.deep)],
)
def test_greedy_text_is_what_transformers_generate_returns(
    family: str, count: int, reference_of: Callable[[str], Reference], prompts: list[Any]
) -> None:
    path = or_skip(CHECKPOINTS[family], "float32")
    with LLM(str(path), dtype="float32", max_model_len=1024, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts[:count], GREEDY)
    for output in outputs:
        assert output.outputs[0].token_ids == reference_of(family).greedy(output.prompt_token_ids, NEW_TOKENS)


def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(text: list[int]) -> None:
    """Over 2,048 positions: top-1 agreement at most 0.5 points below, KL divergence at most 1.2 times."""
    pieces = [text[512 * i : 512 * (i + 1)] for i in range(4)]
    exact = _logprobs(Reference(or_skip(smollm2_dir, "float32")), pieces)
    theirs = _logprobs(Reference(or_skip(smollm2_dir, "bfloat16"), "bfloat16"), pieces)
    with LLM(str(or_skip(smollm2_dir, "bfloat16")), max_model_len=1024, max_num_seqs=8) as llm:
        assert llm.resolution.config.dtype == "bfloat16"
        with record_logits(llm) as recording:
            outputs = llm.generate([{"prompt_token_ids": piece} for piece in pieces], SamplingParams(max_tokens=1))
        rows = [recording.rows[output.request_id, 0] for output in outputs]
    ours = torch.cat([torch.stack([found[i][0] for i in range(512)]) for found in rows]).float().log_softmax(-1)
    assert len(ours) == len(exact) == 2048
    assert _agreement(ours, exact) >= _agreement(theirs, exact) - 0.005
    assert _divergence(exact, ours) <= 1.2 * _divergence(exact, theirs)


def _logprobs(reference: Reference, pieces: list[list[int]]) -> torch.Tensor:
    return torch.cat([reference.logits(piece).float() for piece in pieces]).log_softmax(-1)


def _agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    """Share of positions with the same likeliest token."""
    return float((first.argmax(-1) == second.argmax(-1)).float().mean())


def _divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of ``other`` from ``exact`` (log-probabilities [T, V]), in nats."""
    return float(torch.nn.functional.kl_div(other, exact, log_target=True, reduction="batchmean"))


def test_the_gguf_file_answers_paris() -> None:
    with LLM(str(or_skip(smollm2_gguf)), dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
        assert not llm.load_report.unaccounted()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


def test_the_gguf_file_is_the_safetensors_checkpoint(prompts: list[Any]) -> None:
    """Both hold the same dequantised weights: float32 greedy text is equal."""
    texts = []
    for path in (or_skip(smollm2_gguf), or_skip(smollm2_dir, "float32")):
        with LLM(str(path), dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
            texts.append(
                [output.outputs[0].text for output in llm.generate(prompts[:4], GREEDY.replace(max_tokens=16))]
            )
    assert texts[0] == texts[1]


def test_make_demo_s_command_says_paris() -> None:
    """As `make demo` runs it: one line of text on standard output."""
    question = "What is the capital of France?"
    command = [sys.executable, "-m", "modelbay", "generate", str(or_skip(smollm2_gguf)), "--chat", "--dtype", "float32"]
    command += ["--prompt", question, "--max-tokens", "48", "--temperature", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert "Traceback" not in done.stderr
