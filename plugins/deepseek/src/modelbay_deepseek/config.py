"""The config classes of the family: defaults as in Transformers' classes, or where it has none, in the official ones.

The official repositories bring classes of their own by ``auto_map``; these take their place and run none of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from modelbay.config import PlainConfig
from modelbay.config.limits import MAX_LAYERS
from modelbay.errors import ConfigError


class _FamilyConfig(PlainConfig):
    """What the models compute with is more than nothing."""

    _POSITIVE: ClassVar[tuple[str, ...]] = (
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size",
        "moe_layer_freq", "routed_scaling_factor",
    )  # fmt: skip

    #: Of these, what a checkpoint whose attention is not latent leaves at 0.
    _OF_HEADS: ClassVar[tuple[str, ...]] = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        latent = getattr(self, "kv_lora_rank", None) is not None and getattr(self, "use_mla", True)
        for name in self._POSITIVE:
            value = getattr(self, name, None)
            if (latent or name not in self._OF_HEADS) and value is not None and not value > 0:
                raise ConfigError(f"the config's {name} must be greater than 0, got {value!r}.")


class DeepseekConfig(_FamilyConfig):
    """``model_type`` "deepseek": the first models, with Llama's attention."""

    model_type = "deepseek"

    vocab_size = 102400
    hidden_size = 4096
    intermediate_size = 11008
    moe_intermediate_size = 1407
    num_hidden_layers = 30
    num_attention_heads = 32
    num_key_value_heads: int | None = 32
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq = 1
    first_k_dense_replace = 0
    norm_topk_prob = False
    scoring_func = "softmax"
    topk_method = "greedy"
    hidden_act = "silu"
    max_position_embeddings = 2048
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    tie_word_embeddings = False
    attention_bias = False


class _LatentConfig(_FamilyConfig):
    """What V2 and V3 share: every layer is of kind "mla", and the part of a head that turns has a size of its own."""

    #: An explicit null of these says that there is none; the default says how many there are.
    _NULL_IS_NONE: ClassVar[tuple[str, ...]] = ("q_lora_rank", "n_routed_experts", "n_shared_experts")

    num_hidden_layers = 0
    qk_rope_head_dim = 64

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for name in self._NULL_IS_NONE:
            if name in values:
                setattr(self, name, values[name])
        self.head_dim = self.qk_rope_head_dim
        # What is no number of layers is refused where core reads it.
        count = self.num_hidden_layers if type(self.num_hidden_layers) in (int, float) else 0
        self.layer_types = ["mla"] * min(int(count), MAX_LAYERS)


class DeepseekV2Config(_LatentConfig):
    """``model_type`` "deepseek_v2": V2, V2-Lite, V2.5."""

    model_type = "deepseek_v2"

    vocab_size = 102400
    hidden_size = 4096
    intermediate_size = 11008
    moe_intermediate_size = 1407
    num_hidden_layers = 32
    num_attention_heads = 32
    num_key_value_heads: int | None = None
    n_shared_experts: int | None = 2
    n_routed_experts: int | None = 64
    routed_scaling_factor = 1.0
    kv_lora_rank = 512
    q_lora_rank: int | None = 1536
    qk_rope_head_dim = 64
    v_head_dim = 128
    qk_nope_head_dim = 128
    topk_method = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    num_experts_per_tok: int | None = None
    moe_layer_freq = 1
    first_k_dense_replace = 0
    norm_topk_prob = False
    scoring_func = "softmax"
    hidden_act = "silu"
    max_position_embeddings = 2048
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    rope_interleave = True
    tie_word_embeddings = False
    attention_bias = False
    mlp_bias = False


class DeepseekV3Config(_LatentConfig):
    """``model_type`` "deepseek_v3": V3, V3.1, R1, and Moonlight."""

    model_type = "deepseek_v3"

    vocab_size = 129280
    hidden_size = 7168
    intermediate_size = 18432
    moe_intermediate_size = 2048
    num_hidden_layers = 61
    num_attention_heads = 128
    num_key_value_heads: int | None = 128
    n_shared_experts: int | None = 1
    n_routed_experts: int | None = 256
    routed_scaling_factor = 2.5
    kv_lora_rank = 512
    q_lora_rank: int | None = 1536
    qk_rope_head_dim = 64
    v_head_dim = 128
    qk_nope_head_dim = 128
    topk_method = "noaux_tc"
    n_group: int | None = 8
    topk_group: int | None = 4
    num_experts_per_tok: int | None = 8
    moe_layer_freq = 1
    first_k_dense_replace = 3
    norm_topk_prob = True
    scoring_func = "sigmoid"
    hidden_act = "silu"
    max_position_embeddings = 4096
    rms_norm_eps = 1e-6
    rope_theta = 10000.0
    rope_interleave = True
    tie_word_embeddings = False
    attention_bias = False


class KimiK2Config(DeepseekV3Config):
    """``model_type`` "kimi_k2": V3's architecture with other sizes, all of which its config.json states."""

    model_type = "kimi_k2"
