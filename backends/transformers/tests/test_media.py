"""X10: images and audio through the model's own processor, in batches with text, against Transformers.

Legend: P prompt tokens, O output tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from modelbay import LLM, SamplingParams
from modelbay.errors import UsageError
from modelbay_testing.media_processors import FAMILIES, FIRST, media_checkpoint
from modelbay_testing.recording import record_logits

TOLERANCE = 1e-4
OUTPUT_TOKENS = 16
RATE = 16_000


def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in ((60, 90), (100, 50))]


def sounds() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(length).astype(np.float32) for length in (9000, 15000)]


class Served:
    """One family's checkpoint, loaded, and Transformers' own beside it."""

    def __init__(self, folder: Path, model_type: str) -> None:
        self.folder, self.model, self.processor = media_checkpoint(folder, model_type)
        self.kind = "audio" if "audio" in model_type else "image"
        self.token = FAMILIES[model_type][0]
        self.items: list[Any] = sounds() if self.kind == "audio" else images()  # type: ignore[assignment]
        self.llm = LLM(
            str(self.folder), model_impl="transformers", dtype="float32", max_model_len=256,
            kv_cache_memory_bytes=1 << 24, max_num_batched_tokens=64,
        )  # fmt: skip

    def prompt(self, text: str, numbers: tuple[int, ...]) -> dict[str, Any]:
        items = [(self.items[i], RATE) if self.kind == "audio" else self.items[i] for i in numbers]
        return {"prompt": text, "multi_modal_data": {self.kind: items}}

    def run(self, prompts: list[Any]) -> list[tuple[list[int], list[int], dict[int, torch.Tensor]]]:
        """Of each: prompt ids, output ids, and the logits of the tokens that were computed, by position."""
        # Placeholders are not generated: without an item they would mean something else.
        bias = dict.fromkeys(range(FIRST, 256), -100.0)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logit_bias=bias)
        with record_logits(self.llm) as recording:
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            (output.prompt_token_ids, output.outputs[0].token_ids,
             {place: rows[-1] for place, rows in recording.rows[output.request_id, 0].items()})
            for output in outputs
        ]  # fmt: skip

    def expected(self, text: str, numbers: tuple[int, ...], output: list[int]) -> tuple[list[int], torch.Tensor]:
        """Prompt ids by Transformers' processor, and its model's logits [P + O, V] of prompt and output."""
        items = [self.items[i] for i in numbers]
        given: dict[str, Any] = {"audio" if self.kind == "audio" else "images": items} if items else {}
        inputs = dict(self.processor(text=[text], return_tensors="pt", **given))
        prompt = inputs["input_ids"][0].tolist()
        inputs["input_ids"] = torch.tensor([[*prompt, *output]])
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                rest = torch.full((1, len(output)), int(name == "attention_mask"), dtype=inputs[name].dtype)
                inputs[name] = torch.cat([inputs[name], rest], 1)
        if not items:
            inputs = {"input_ids": inputs["input_ids"]}
        with torch.inference_mode():
            return prompt, self.model(**inputs, use_cache=False).logits[0].float()

    def close(self) -> None:
        self.llm.close()


@pytest.fixture(params=sorted(FAMILIES), scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp(request.param), request.param)
    yield found
    found.close()


def check(served: Served, plans: list[tuple[str, tuple[int, ...]]]) -> None:
    prompts = [served.prompt(text, numbers) if numbers else text for text, numbers in plans]
    for (text, numbers), (prompt, output, logits) in zip(plans, served.run(prompts), strict=True):
        wanted, expected = served.expected(text, numbers, output)
        assert prompt == wanted
        assert len(output) == OUTPUT_TOKENS
        assert len(logits) >= OUTPUT_TOKENS - 1
        scale = max(1.0, expected.abs().max().item() / 10)
        for place, row in logits.items():
            assert (row - expected[place]).abs().max().item() <= TOLERANCE * scale, (text, place)
        likeliest = expected[len(prompt) - 1 : -1, :FIRST].topk(2).values
        clear = likeliest[:, 0] - likeliest[:, 1] > 10 * TOLERANCE * scale
        assert torch.equal(expected[len(prompt) - 1 : -1, :FIRST].argmax(-1)[clear], torch.tensor(output)[clear])


def test_x10_a_mixed_batch_equals_transformers(served: Served) -> None:
    """Text alone, one item, two items, and the same item again, in steps of at most 64 tokens."""
    token = served.token
    check(
        served,
        [
            ("The quick brown fox", ()),
            (f"A model {token} is loaded", (0,)),
            (f"{token} and {token} stay apart", (1, 0)),
            ("Numbers 0 1 2 3 stay apart; words like the, and, of", ()),
            (f"A model {token} is loaded", (1,)),
        ],
    )
    # Once more: the same, now from the prefix cache and the store of features.
    check(served, [(f"A model {token} is loaded", (1,)), (f"{token} and {token} stay apart", (1, 0))])


def test_x10_the_number_of_placeholders_must_be_that_of_items(served: Served) -> None:
    token = served.token
    for text, numbers in ((f"one {token}", (0, 1)), ("none", (0,)), (f"{token} {token}", (0,))):
        with pytest.raises(UsageError, match="placeholder"):
            served.llm.generate([served.prompt(text, numbers)], SamplingParams(max_tokens=1), use_tqdm=False)
