"""Qwen2 against Transformers."""

from __future__ import annotations

from modelbay_testing.conformance import ModelConformance


class TestQwen2(ModelConformance):
    plugin = "modelbay_qwen2.plugin"
    model_type = "qwen2"
    variants = {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "window from layer 1": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        "yarn": {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128,
            }
        },
    }  # fmt: skip
