"""A config directory and the config stage run on it, with whatever plugins a test makes up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelbay import hookimpl
from modelbay.args import EngineArgs
from modelbay.config import ModelConfig, load_config
from modelbay.plugins import load_plugins
from modelbay.source import find_files
from modelbay.trace import Trace

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


@pytest.fixture
def llama() -> dict[str, Any]:
    return json.loads(json.dumps(LLAMA))


@pytest.fixture
def plugin() -> Callable[..., ModuleType]:
    """``plugin("name", register_…=[records])``: an in-process plugin."""

    def make(name: str, **hooks: list[Any]) -> ModuleType:
        module = ModuleType(name)
        for hook, records in hooks.items():
            setattr(module, hook, hookimpl(_returning(hook, records)))
        return module

    return make


def _returning(name: str, records: list[Any]) -> Callable[[], list[Any]]:
    def hook() -> list[Any]:
        return records

    hook.__name__ = name
    return hook


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ModelConfig, Trace]]:
    """``load(config, plugins=[…], files={name: json}, **engine arguments) -> (ModelConfig, Trace)``."""

    monkeypatch.setenv("MODELBAY_PLUGINS", "")  # only core, and what the test adds
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def run(
        config: dict[str, Any] | None,
        plugins: list[Any] | None = None,
        files: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[ModelConfig, Trace]:
        contents = dict(files or {})
        if config is not None:
            contents["config.json"] = config
        for name, value in contents.items():
            text = value if isinstance(value, str) else json.dumps(value)
            (tmp_path / name).write_text(text, encoding="utf-8")
        trace = Trace()
        args = EngineArgs.create(str(tmp_path), device="cpu", **kwargs)
        loaded = load_plugins(plugins or [])
        suffixes = [
            suffix for owned in loaded.all("load_formats") if owned.value.config for suffix in owned.value.suffixes
        ]
        found = find_files(str(tmp_path), file_suffixes=suffixes, trace=trace)
        return load_config(found, loaded, args, trace), trace

    return run
