"""Tiny embedding models with the files of sentence-transformers, and real sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

from modelbay import LLM
from modelbay_testing.tiny import tiny_tokenizer

#: What keeps a model tiny, under the names of every family here.
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "type_vocab_size": 2, "local_attention": 16, "num_labels": 3,
}  # fmt: skip
#: Positions are counted from the padding token's id on.
ROBERTA = {"max_position_embeddings": 513, "type_vocab_size": 1}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """``make("BertModel", num_labels=1)``: a random float32 checkpoint with tokenizer, and Transformers' own model."""

    def build(name: str, **overrides: Any) -> tuple[Path, Any]:
        import transformers

        from modelbay_testing.matrix.reference import randomize

        cls = getattr(transformers, name)
        values = {**SIZES, **(ROBERTA if "Roberta" in name else {}), **overrides}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(cls.config_class(**values)).eval()
            randomize(model)
        folder = tmp_path / name
        model.save_pretrained(folder)
        tiny_tokenizer(folder, chat_template=None)
        return folder, model

    return build


@pytest.fixture
def open_model() -> Iterator[Callable[..., LLM]]:
    """``open_model(path, …)``: an `LLM` in float32 that is closed with the test."""
    with ExitStack() as stack:
        yield lambda path, **args: stack.enter_context(
            LLM(str(path), **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, **args})
        )


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """200 different sentences that people wrote: from the descriptions of installed packages."""
    found: dict[str, None] = {}
    for distribution in sorted(distributions(), key=lambda entry: entry.metadata["Name"].lower()):
        body = distribution.metadata.get_payload() or distribution.metadata.get("Description") or ""
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(str(body).split())):
            if 20 < len(sentence) < 200 and re.match(r"[A-Z][a-z]+ [a-z]+ ", sentence):
                found.setdefault(sentence)
        if len(found) >= 2000:
            break
    every = list(found)
    assert len(every) >= 200, "the environment has too few descriptions to take sentences from"
    return every[:: len(every) // 200][:200]
