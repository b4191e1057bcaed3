"""explain names the metadata key that each fact of a GGUF file stands under, and it has that value there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from modelbay.args import EngineArgs
from modelbay.config import ModelConfig, load_config
from modelbay.plugins import load_plugins
from modelbay.source import find_files
from modelbay.trace import Trace
from modelbay_gguf import plugin
from modelbay_gguf.config import stored_config
from modelbay_gguf.header import read_header
from modelbay_gguf.rope import llama3_factors

ARCHS = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "starcoder2", "stablelm"]


def _load(path: Any, **kwargs: Any) -> tuple[ModelConfig, Trace]:
    trace = Trace()
    files = find_files(str(path), file_suffixes=[".gguf"], trace=trace)
    args = EngineArgs.create(str(path), device="cpu", **kwargs)
    return load_config(files, load_plugins([plugin]), args, trace), trace


@pytest.mark.parametrize("arch", ARCHS)
def test_every_key_of_the_config_has_a_source_that_holds_it(arch: str, write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(arch)
    stored, metadata = stored_config(tiny.path), read_header(tiny.path).metadata
    held = 0
    for dotted, source in stored.sources.items():
        value: Any = stored.values
        for key in dotted.split("."):
            value = value[key]
        if not source.startswith("derived: "):
            assert metadata[source] == value, f"{dotted}: {source}"
            held += 1
    assert held >= 6
    assert {key.partition(".")[0] for key in stored.sources} == set(stored.values)


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_name_the_file_and_never_a_config_json(arch: str, write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(arch)
    config, trace = _load(tiny.path)
    metadata, name = read_header(tiny.path).metadata, re.escape(tiny.path.name)
    for decision in trace:
        assert "config.json" not in decision.source.replace("no generation_config.json", ""), decision
    for fact, source in config.sources.items():
        for key in re.findall(rf"{name} \(([\w.]+)\)", source):
            assert key in metadata, f"{fact}: {source}"
    assert config.sources["num_layers"] == f"{tiny.path.name} ({arch}.block_count)"
    assert config.sources["hidden_size"] == f"{tiny.path.name} ({arch}.embedding_length)"
    assert config.sources["eos_token_ids"] == f"{tiny.path.name} (tokenizer.ggml.eos_token_id)"


def test_a_fact_that_the_file_only_implies_is_derived(write_gguf: Callable[..., Any]) -> None:
    config, _ = _load(write_gguf("llama").path)
    assert config.sources["vocab_size"] == "derived: rows of token_embd.weight"
    assert config.sources["tie_word_embeddings"] == "derived: whether output.weight is absent"
    assert config.sources["architectures"] == "derived: from general.architecture"


def test_llama3_scaling_is_derived_from_its_tensor(write_gguf: Callable[..., Any]) -> None:
    base, size = 10000.0, 16
    factors = llama3_factors(base, size, 8.0, 8192, 1.0, 4.0).astype(np.float32)
    config, _ = _load(write_gguf("llama", tensors={"rope_freqs.weight": factors}).path)
    assert "factor" in config.sources["rope"]
    assert "llama3's, which rope_freqs.weight is made of" in config.sources["rope"]


def test_an_override_of_a_gguf_file_is_named_as_the_argument(write_gguf: Callable[..., Any]) -> None:
    config, _ = _load(write_gguf("llama").path, hf_overrides={"num_hidden_layers": 1, "rope_theta": 5.0})
    assert config.sources["num_layers"] == "argument hf_overrides (num_hidden_layers)"
    assert "theta: argument hf_overrides (rope_theta)" in config.sources["rope"]


def test_several_end_tokens_name_all_their_keys(write_gguf: Callable[..., Any]) -> None:
    config, _ = _load(write_gguf(metadata=lambda writer: writer.add_eot_token_id(7)).path)
    assert config.sources["eos_token_ids"] == ("derived: tokenizer.ggml.eos_token_id, tokenizer.ggml.eot_token_id")
