"""Tokenizer directories, and the tokenizer stage run on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay.args import EngineArgs
from modelbay.plugins import load_plugins
from modelbay.source import find_repository
from modelbay.tokenizer import load_tokenizer
from modelbay.trace import Trace
from modelbay_testing.tiny import tiny_tokenizer


@pytest.fixture(autouse=True)
def only_core_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELBAY_PLUGINS", "")
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    monkeypatch.delenv("MODELBAY_USE_FASTOKENS", raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A byte-level BPE tokenizer of 209 tokens beside the config.json of a model with 256."""
    folder = tiny_tokenizer(tmp_path / "tiny")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.fixture
def load() -> Callable[..., tuple[Any, Trace]]:
    """``load(folder, plugins=[…], vocab_size=…, **engine arguments) -> (tokenizer, Trace)``."""

    def run(
        folder: Path | str, plugins: list[Any] | None = None, vocab_size: int = 1_000_000, **kwargs: Any
    ) -> tuple[Any, Trace]:
        trace = Trace()
        loaded = load_plugins(plugins or [])
        suffixes = [suffix for owned in loaded.all("load_formats") for suffix in owned.value.suffixes]
        files = find_repository(str(folder), file_suffixes=suffixes, trace=trace)
        args = EngineArgs.create(str(folder), **kwargs)
        config: Any = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=())
        return load_tokenizer(files, config, loaded, args, trace), trace

    return run
