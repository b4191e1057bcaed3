"""The numbers: logits of every token of every request against Transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelbay import LLM, SamplingParams
from modelbay_testing.recording import Reference, record_logits

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
CHECKPOINTS = [
    "llama", "llama-tied", "llama-biases", "llama-linear", "llama-llama3", "qwen2", "qwen2-mixed", "qwen2-yarn",
    "mistral-window", "mistral-wide-heads",
]  # fmt: skip


@pytest.fixture(params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 100}, {"enable_chunked_prefill": False, "enable_prefix_caching": False}],
    ids=["chunked", "whole"],
)
def test_logits_and_greedy_text_are_those_of_transformers(
    name: str, options: dict[str, Any], checkpoint: Callable[..., Any], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """Prefill and decode, eight lengths in one batch, and again with what the prefix cache kept."""
    reference = Reference(checkpoint(name))
    llm = open_llm(name, **options)
    for already_there in (False, True):
        with record_logits(llm) as recording:
            outputs = llm.generate(prompts, GREEDY)
        for output in outputs:
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            computed = recording.positions(output.request_id)
            assert computed == list(range(output.metrics.num_cached_tokens, len(tokens) - 1))
            expected = reference.logits(tokens)
            assert recording.worst_difference(output.request_id, expected) <= TOLERANCE
            assert output.outputs[0].token_ids == reference.greedy(output.prompt_token_ids, 16)
        cached = [output.metrics.num_cached_tokens for output in outputs]
        if already_there and options.get("enable_prefix_caching", True):
            assert all(count >= len(p["prompt_token_ids"]) - 16 for count, p in zip(cached, prompts, strict=True))
        elif not already_there:
            assert cached[:6] == [0] * 6


@pytest.mark.parametrize("change", [{"sliding_window": 21}, {"rope_parameters": {"rope_theta": 20000.0}}])
def test_the_comparison_sees_a_small_change_of_the_config(
    change: dict[str, Any], checkpoint: Callable[..., Any], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """A test of these tests: a window of one more token is far outside the tolerance."""
    llm = open_llm("mistral-window", hf_overrides=change)
    with record_logits(llm) as recording:
        (output,) = llm.generate(prompts[3], GREEDY)
    expected = Reference(checkpoint("mistral-window")).logits([*output.prompt_token_ids, *output.outputs[0].token_ids])
    assert recording.worst_difference(output.request_id, expected) > 100 * TOLERANCE


def test_logprobs_and_prompt_logprobs_are_those_of_transformers(
    checkpoint: Callable[..., Any], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """Whatever is drawn, the numbers are the model's own; a prompt over several chunks, and a repeated one."""
    reference = Reference(checkpoint("llama"))
    llm = open_llm("llama", max_num_batched_tokens=48)
    params = SamplingParams(temperature=1.5, top_k=9, seed=3, max_tokens=6, logprobs=4, prompt_logprobs=2)
    for output in llm.generate([prompts[0], prompts[4], prompts[4]], params):
        completion, length = output.outputs[0], len(output.prompt_token_ids)
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        expected = reference.logits(tokens).log_softmax(-1)
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == length
        assert len(completion.logprobs) == len(completion.token_ids)
        for position, entries in enumerate([*output.prompt_logprobs[1:], *completion.logprobs], start=1):
            assert entries is not None
            row, token = expected[position - 1], tokens[position]
            k = 2 if position < length else 4
            assert set(entries) == {token, *row.topk(k).indices.tolist()}
            for token_id, entry in entries.items():
                assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
                assert entry.rank == int((row > row[token_id]).sum()) + 1
        chosen = [
            entries[token].logprob for entries, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_bfloat16_runs_in_bfloat16(open_llm: Callable[..., LLM], prompts: list[Any]) -> None:
    llm = open_llm("llama", dtype="bfloat16")
    assert llm.apply_model(lambda model: {p.dtype for p in model.parameters()}) == [{torch.bfloat16}]
    assert {view.dtype for view in llm.engine.runner.cache.views.values()} == {torch.bfloat16}
    assert all(output.finished for output in llm.generate(prompts, GREEDY))
