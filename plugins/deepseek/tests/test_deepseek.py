"""DeepSeek V2 and V3 against Transformers."""

from __future__ import annotations

from modelbay_testing.conformance import ModelConformance

_SMALL = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_V2_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.0}
_V3_EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}


def yarn(mscale: float, mscale_all_dim: float) -> dict:
    return {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "original_max_position_embeddings": 128,
            "beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
        }
    }  # fmt: skip


class TestDeepseekV2(ModelConformance):
    plugin = "modelbay_deepseek.plugin"
    model_type = "deepseek_v2"
    variants = {
        "lite": {**_SMALL, **_V2_EXPERTS, "q_lora_rank": None, **yarn(0.707, 0.707)},
        "groups": {
            **_SMALL, **_V2_EXPERTS, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2,
        },
        "dense, biased": {**_SMALL, "first_k_dense_replace": 9, "q_lora_rank": 24, "attention_bias": True},
    }  # fmt: skip


class TestDeepseekV3(ModelConformance):
    plugin = "modelbay_deepseek.plugin"
    model_type = "deepseek_v3"
    variants = {
        "groups": {**_SMALL, **_V3_EXPERTS, "q_lora_rank": 24, **yarn(1.0, 1.0)},
        "one group, no low rank": {
            **_SMALL, **_V3_EXPERTS, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "v_head_dim": 40,
            "norm_topk_prob": False, **yarn(1.0, 0.5),
        },
        "halves": {**_SMALL, **_V3_EXPERTS, "q_lora_rank": 24, "rope_interleave": False},
    }  # fmt: skip
