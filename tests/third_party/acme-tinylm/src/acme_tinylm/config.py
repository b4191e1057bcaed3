"""TinyLM's config: the defaults of its class, and the names that its checkpoints use."""

from __future__ import annotations

from modelbay.config import PlainConfig


class AcmeConfig(PlainConfig):
    model_type = "acme_tinylm"
    aliases = {"num_hidden_layers": ("depth",), "num_key_value_heads": ("kv_heads",)}

    vocab_size = 32000
    hidden_size = 2048
    intermediate_size = 5632
    depth = 22
    num_attention_heads = 16
    kv_heads = 4
    max_position_embeddings = 4096
    hidden_act = "silu"
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    tie_word_embeddings = False
    embedding_scale = 1.0
    logit_divisor = 1.0
