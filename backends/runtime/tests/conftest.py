"""Fixtures of the runtime's tests: tiny checkpoints, made once, and engines on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM
from modelbay_testing.tiny import tiny_checkpoint

#: Name -> (model_type, config values): every path through the blocks that the families share.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "mistral-wide-heads": ("mistral", {"head_dim": 32, "num_key_value_heads": 1}),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices only wait for each other on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint("llama")``: the directory of that checkpoint, made at the first call."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            model_type, values = CHECKPOINTS[name]
            made[name] = tiny_checkpoint(tmp_path_factory.mktemp(name), model_type, **values)
        return made[name]

    return make


@pytest.fixture
def open_llm(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    """``open_llm("llama", max_model_len=64)``: an LLM that is closed with the test."""
    with ExitStack() as stack:
        yield lambda name, **options: stack.enter_context(LLM(str(checkpoint(name)), **options))


@pytest.fixture(scope="session")
def prompts() -> list[dict[str, list[int]]]:
    """Eight prompts of 5 to 230 tokens; the last two begin with the whole of the fourth."""
    draw = random.Random(7)
    made = [[1, *(draw.randrange(3, 250) for _ in range(length - 1))] for length in (5, 9, 16, 64, 100, 230)]
    made += [[*made[3], *(draw.randrange(3, 250) for _ in range(more))] for more in (1, 37)]
    return [{"prompt_token_ids": ids} for ids in made]
