"""The config class of Qwen2 and Qwen2.5: defaults as in Transformers' class of the same name."""

from __future__ import annotations

from modelbay.config import PlainConfig


class Qwen2Config(PlainConfig):
    """``model_type`` "qwen2". A window only with ``use_sliding_window``, and then from ``max_window_layers`` on."""

    model_type = "qwen2"

    vocab_size = 151936
    hidden_size = 4096
    intermediate_size = 22016
    num_hidden_layers = 32
    num_attention_heads = 32
    num_key_value_heads: int | None = 32
    hidden_act = "silu"
    max_position_embeddings = 32768
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    tie_word_embeddings = False
    use_sliding_window = False
    sliding_window: int | None = 4096
    max_window_layers = 28
