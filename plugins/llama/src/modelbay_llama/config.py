"""The config classes of Llama and Mistral: defaults as in Transformers' classes of the same name."""

from __future__ import annotations

from modelbay.config import PlainConfig


class LlamaConfig(PlainConfig):
    """``model_type`` "llama". No KV heads means as many as heads; no head size means hidden size / heads."""

    model_type = "llama"

    vocab_size = 32000
    hidden_size = 4096
    intermediate_size = 11008
    num_hidden_layers = 32
    num_attention_heads = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act = "silu"
    max_position_embeddings = 2048
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    tie_word_embeddings = False
    attention_bias = False
    mlp_bias = False


class MistralConfig(PlainConfig):
    """``model_type`` "mistral". Every layer has the window, unless the config says null."""

    model_type = "mistral"

    vocab_size = 32000
    hidden_size = 4096
    intermediate_size = 14336
    num_hidden_layers = 32
    num_attention_heads = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act = "silu"
    max_position_embeddings = 4096 * 32
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    tie_word_embeddings = False
    sliding_window: int | None = 4096
