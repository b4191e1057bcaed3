"""SmolLM2-135M-Instruct in Transformers' own Llama code, on the runtime's cache, against Transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modelbay import LLM, SamplingParams
from modelbay_testing.assets import or_skip, smollm2_dir
from modelbay_testing.recording import Reference, record_logits

pytestmark = pytest.mark.real

TOLERANCE = 2e-3
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = ["Water is", "In the beginning there was a list of numbers, 2, 3, 5, 7, 11,", "def main(argv):\n    parser ="]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = or_skip(smollm2_dir, "float32")
    with LLM(str(path), model_impl="transformers", dtype="float32", device="cpu", max_model_len=512) as opened:
        yield opened
    torch.set_num_threads(before)


def test_a4_it_runs_on_this_backend(llm: LLM) -> None:
    assert llm.apply_model(lambda model: type(model).__name__) == ["TransformersForCausalLM"]


def test_x1_logits_are_those_of_transformers(llm: LLM) -> None:
    """Three lengths in one batch, prompts and 16 decoded tokens each."""
    reference = Reference(or_skip(smollm2_dir, "float32"))
    with record_logits(llm) as recording:
        outputs = llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = reference.logits(tokens)
        assert recording.worst_difference(output.request_id, expected) <= TOLERANCE
        begin = len(output.prompt_token_ids) - 1
        assert output.outputs[0].token_ids == expected[begin:-1].argmax(-1).tolist()


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
