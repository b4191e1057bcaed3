"""X10: what the engine offers × images, on models of Transformers: an output does not depend on chunks, blocks,
prefixes, preemption, neighbours or streaming. One model each with plain positions, M-RoPE, and spans seen both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelbay import LLM, SamplingParams
from modelbay.errors import ModelbayError
from modelbay_testing.media_processors import FAMILIES, FIRST, media_checkpoint

COUNT = 12
#: Placeholders are not generated: without an item they would mean something else.
BIAS = dict.fromkeys(range(FIRST, 256), -100.0)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "logit_bias": BIAS, **more})


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (60, 90, 3), np.uint8))


class Model:
    """A checkpoint, its prompts, and what Transformers' own `generate` gives for each."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self.folder, self.reference, self.processor = media_checkpoint(folder, model_type)
        token = FAMILIES[model_type][0]
        self.plans = [
            (f"A model {token} is loaded", [picture(1)]),
            (f"{token} and the quick brown fox {token} stay apart", [picture(2), picture(1)]),
            ("Numbers 0 1 2 3 stay apart; words like the, and, of, to, in", []),
            (f"A model {token} is loaded, its layers are placed", [picture(2)]),
        ]
        self.prompts = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in self.plans]
        self.wanted = [self._generate(text, images) for text, images in self.plans]

    @torch.inference_mode()
    def _generate(self, text: str, images: list[Any]) -> list[int]:
        inputs = self.processor(text=[text], return_tensors="pt", **({"images": images} if images else {}))
        if not images:
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        length = inputs["input_ids"].shape[1]
        out = self.reference.generate(
            **inputs, max_new_tokens=COUNT, do_sample=False, eos_token_id=None,
            suppress_tokens=list(range(FIRST, 256)),
        )  # fmt: skip
        found: list[int] = out[0, length:].tolist()
        return found


@pytest.fixture(scope="module", params=["llava", "qwen2_vl", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def open_model(model: Model) -> Iterator[Callable[..., LLM]]:
    with ExitStack() as stack:
        given = {"model_impl": "transformers", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
        yield lambda **options: stack.enter_context(LLM(str(model.folder), **{**given, **options}))


def outputs_of(llm: LLM, prompts: list[Any], params: SamplingParams | None = None) -> list[list[int]]:
    found = llm.generate(prompts, params or greedy(), use_tqdm=False)
    return [completion.token_ids for output in found for completion in output.outputs]


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 7}, {"block_size": 5, "enable_prefix_caching": False}, {"max_num_seqs": 1}],
    ids=str,
)
def test_output_does_not_depend_on_chunks_and_blocks(
    options: dict[str, Any], model: Model, open_model: Callable[..., LLM]
) -> None:
    llm = open_model(**options)
    assert outputs_of(llm, model.prompts) == model.wanted
    assert outputs_of(llm, model.prompts[::-1]) == model.wanted[::-1]


def test_output_does_not_depend_on_cached_prefixes(model: Model, open_model: Callable[..., LLM]) -> None:
    llm = open_model(block_size=4)
    for _ in range(2):
        found = llm.generate(model.prompts, greedy(), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == model.wanted
    assert all(output.metrics is not None and output.metrics.num_cached_tokens >= 4 for output in found)


def test_output_does_not_depend_on_preemption(model: Model, open_model: Callable[..., LLM]) -> None:
    layout = open_model().engine.kv.layout
    blocks = layout.blocks_for(64, 16) + 1
    llm = open_model(
        max_model_len=64, max_num_batched_tokens=16, enable_prefix_caching=False,
        kv_cache_memory_bytes=blocks * layout.page_elements() * 4,
    )  # fmt: skip
    assert outputs_of(llm, model.prompts) == model.wanted
    assert llm.engine.scheduler.num_preemptions > 0


def test_several_outputs_streams_logprobs_and_stop_strings(model: Model, open_model: Callable[..., LLM]) -> None:
    llm = open_model(block_size=4)
    prompt, wanted = model.prompts[1], model.wanted[1]
    assert outputs_of(llm, [prompt], greedy(temperature=1.0, top_k=1, n=3)) == [wanted] * 3
    streamed = list(llm.stream(prompt, greedy()))
    assert streamed[-1].outputs[0].token_ids == wanted
    [output] = llm.generate(prompt, greedy(logprobs=1, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.outputs[0].token_ids == wanted
    text = output.outputs[0].text
    [stopped] = llm.generate(prompt, greedy(stop=[text[1:3]]), use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(text[1:3])]


@pytest.mark.deep
@pytest.mark.parametrize("model", ["llava", "gemma3"], indirect=True)
def test_output_does_not_depend_on_ranks(model: Model, open_model: Callable[..., LLM]) -> None:
    """Tensor parallel × images: every rank encodes and merges the same. Stages are refused by name."""
    llm = open_model(tensor_parallel_size=2, max_num_batched_tokens=32)
    assert outputs_of(llm, model.prompts) == model.wanted
    with pytest.raises(ModelbayError, match=r"pipeline_parallel_size = 2: .* reads more than text"):
        open_model(pipeline_parallel_size=2)
