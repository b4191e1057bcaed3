"""Case 17: where a position table begins with rows that no token gets, the model serves as many as there are others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelbay import LLM
from modelbay.errors import UsageError
from modelbay_runtime.check import check_model
from modelbay_testing.tiny import tiny_checkpoint

ROWS, PADDING = 34, 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": ROWS}
    return tiny_checkpoint(tmp_path, "xlm-roberta", pad_token_id=PADDING, **sizes)


def test_c7_the_longest_prompt_is_what_the_table_has_rows_for(checkpoint: Path) -> None:
    from transformers import AutoModel

    ids = [5 + i % 20 for i in range(ROWS - PADDING - 1)]
    reference = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids])).last_hidden_state[0]
    with LLM(str(checkpoint), device="cpu", dtype="float32", runner="pooling") as llm:
        [output] = llm.encode({"prompt_token_ids": ids}, use_tqdm=False)
        assert (output.hidden_states - expected).abs().max() < 1e-4
        with pytest.raises(UsageError, match="the prompt has 33 tokens"):
            llm.encode({"prompt_token_ids": [*ids, 5]}, use_tqdm=False)


def test_c7_asking_for_more_is_refused_before_weights_are_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="max_model_len 33 is more than the model's 32"):
        LLM(str(checkpoint), device="cpu", runner="pooling", max_model_len=33)
    report = check_model(str(checkpoint), {"device": "cpu", "runner": "pooling", "load_format": "dummy"})
    assert report.memory is not None
    assert report.memory.max_model_len == 32
