"""X1: rotary frequencies that would follow the longest position of a batch are fixed for one instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modelbay import LLM
from modelbay.errors import BackendError
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)],
}  # fmt: skip


def load(path: Path, max_model_len: int) -> LLM:
    return LLM(
        str(path), model_impl="transformers", dtype="float32", max_model_len=max_model_len,
        kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=64,
    )  # fmt: skip


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (length,), generator=generator).tolist() for length in lengths]


def test_x1_longrope_is_short_or_long_by_max_model_len(tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32, max_position_embeddings=128
    )
    with load(path, 32) as llm:
        found = engine_logits(llm, prompts(1, 5, 20), 4)
        fixed = llm.resolution.trace.find("rotary rotary_emb")
    assert fixed is not None
    assert fixed.answer == "longrope, fixed for 32 tokens"
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4
    with load(path, 128) as llm:
        found = engine_logits(llm, prompts(40, 100), 4)
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4


def test_x1_a_short_request_does_not_depend_on_a_long_neighbour(tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path, "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=32, max_position_embeddings=128
    )
    short, long = prompts(10, 60)
    with load(path, 128) as llm:
        alone = engine_logits(llm, [short], 4)[0][1]
    with load(path, 128) as llm:
        beside = engine_logits(llm, [short, long], 4)[0][1]
    assert (alone - beside).abs().max() <= 1e-5


def test_x1_dynamic_frequencies_are_those_of_max_model_len(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = tiny_checkpoint(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    with load(path, 64) as llm:
        found = engine_logits(llm, prompts(5, 40), 4)
    assert worst_difference([rows for _, rows in found], transformers_logits(path, [ids for ids, _ in found])) <= 1e-4
    with load(path, 128) as llm:
        (ids, rows), *_ = engine_logits(llm, prompts(20), 4)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        reference(torch.zeros(1, 128, dtype=torch.long))  # its frequencies grow to 128 tokens
        reference.model.rotary_emb.rope_type = "as they are"
        expected = reference(torch.tensor([ids[:-1]])).logits[0]
    assert (rows - expected).abs().max() <= 1e-4


def test_x1_a_rotary_of_its_own_that_follows_the_batch_is_refused(tmp_path: Path) -> None:
    rope = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
    path = tiny_checkpoint(
        tmp_path, "phimoe", rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=128
    )
    with pytest.raises(BackendError, match="depends on the longest position of the whole batch"):
        load(path, 128)
