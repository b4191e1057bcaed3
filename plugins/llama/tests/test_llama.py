"""Llama and Mistral against Transformers."""

from __future__ import annotations

import json
from pathlib import Path

from modelbay import resolve
from modelbay_testing.conformance import ModelConformance
from modelbay_testing.tiny import tiny_checkpoint

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


class TestLlama(ModelConformance):
    plugin = "modelbay_llama.plugin"
    model_type = "llama"
    variants = {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "wide heads": {"head_dim": 32},
        "llama3 rope": {"rope_parameters": _LLAMA3},
        "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        "one kv head": {"num_key_value_heads": 1, "hidden_act": "gelu"},
    }


class TestMistral(ModelConformance):
    plugin = "modelbay_llama.plugin"
    model_type = "mistral"
    variants = {"full": {}, "window": {"sliding_window": 20}}


def test_a_config_of_the_first_conversions_resolves(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["LLaMAForCausalLM"]
    config["max_sequence_length"] = config.pop("max_position_embeddings")
    (path / "config.json").write_text(json.dumps(config))
    resolution = resolve(str(path))
    assert (resolution.architecture, resolution.config.max_model_len) == ("LlamaForCausalLM", 512)
    decision = resolution.trace.find("patch llama-first-conversions")
    assert decision is not None
    assert decision.source.startswith("modelbay-llama")
