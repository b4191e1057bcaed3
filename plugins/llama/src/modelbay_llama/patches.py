"""Configs as they were once written."""

from __future__ import annotations

from typing import Any


def first_conversions(config: dict[str, Any]) -> str | None:
    """The first conversions of Llama (early 2023) spelled the class and the length in their own way."""
    done = []
    names = config.get("architectures") or []
    if "LLaMAForCausalLM" in names:
        config["architectures"] = ["LlamaForCausalLM" if name == "LLaMAForCausalLM" else name for name in names]
        done.append("LLaMAForCausalLM is LlamaForCausalLM")
    if "max_sequence_length" in config and config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = config.pop("max_sequence_length")
        done.append("max_sequence_length is max_position_embeddings")
    return "; ".join(done) or None
