"""A whole model on this kernel set, against the same model on the torch reference."""

from __future__ import annotations

import pytest

from modelbay import LLM, SamplingParams
from modelbay_testing.tiny import tiny_checkpoint

#: Alone, and beside others: decodes and chunks of prefill in one step.
PROMPTS = [[5, 9, 77, 31] * 10, [1, 2, 3], list(range(40, 50))]


def generate(path, kernels, **options):
    """Per prompt: ids of the continuation, and [tokens] dicts of the five best log-probabilities."""
    with LLM(
        str(path), kernels=kernels, dtype="float32", max_model_len=128, max_num_batched_tokens=32, device="auto",
        enable_prefix_caching=False, kv_cache_memory_bytes=4 << 20, **options,
    ) as llm:  # fmt: skip
        sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        return [result.outputs[0] for result in results], llm.resolution.trace


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_tiny_model_agrees_with_the_torch_kernels(tmp_path, model_type):
    """One full, one with a sliding window."""
    window = {"sliding_window": 24} if model_type == "mistral" else {}
    path = tiny_checkpoint(tmp_path / "model", model_type, **window)
    want, _ = generate(path, "torch")
    got, trace = generate(path, "triton")
    chosen = {d.question.split(" of ")[0]: d.answer for d in trace.decisions if d.stage == "kernels"}
    attention = "attention.sliding" if window else "attention.full"
    for op in ("rms_norm", "rotary", "act_and_mul", "write_cache", attention):
        assert chosen[op] == "triton", op
    for ours, theirs in zip(got, want, strict=True):
        assert list(ours.token_ids) == list(theirs.token_ids)
        for mine, reference in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.keys() == reference.keys()
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(reference[token].logprob, abs=1e-4)
