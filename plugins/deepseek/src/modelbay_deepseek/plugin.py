"""What modelbay-deepseek adds: the DeepSeek family, and multi-head latent attention. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import ArchSpec, AttentionKindSpec, ConfigClassSpec, KernelSpec
from modelbay.weights.transforms import Ignore, Rename, Stack, Transform

_MLA = "modelbay_deepseek.attention:latent_attention"

#: Experts stand one by one in a checkpoint, and in one tensor of each kind in the model.
_TRANSFORMS: tuple[Transform, ...] = (
    Ignore(r"\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$", "the draft layer's copy of the model's own"),
    Rename(r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.correction"),
    *(
        Stack(rf"\.experts\.(?P<index>\d+)\.{part}\.weight{suffix}$", f".experts.{part}{suffix}")
        for part in ("gate_proj", "up_proj", "down_proj")
        for suffix in ("", "_scale_inv")
    ),
)
_OUTER_PLAN = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
_MLP_PLAN = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.shared_experts.gate_proj": "colwise",
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
_FULL_PLAN = {
    **_OUTER_PLAN,
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    **_MLP_PLAN,
}
_LATENT_PLAN = {
    **_OUTER_PLAN,
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    **_MLP_PLAN,
}
_PARALLEL = ("tp", "pp", "ep", "dp")
_PP_PLAN = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}


@hookimpl
def register_architectures() -> list[ArchSpec]:
    return [
        ArchSpec(
            name="DeepseekForCausalLM",
            target="modelbay_deepseek.model:DeepseekForCausalLM",
            model_types=("deepseek",),
            parallel=_PARALLEL,
            tp_plan=_FULL_PLAN,
            pp_plan=_PP_PLAN,
            transforms=_TRANSFORMS,
            examples=("deepseek-ai/deepseek-moe-16b-chat",),
        ),
        ArchSpec(
            name="DeepseekV2ForCausalLM",
            target="modelbay_deepseek.model:DeepseekV2ForCausalLM",
            model_types=("deepseek_v2",),
            attention=("mla",),
            parallel=_PARALLEL,
            tp_plan=_LATENT_PLAN,
            pp_plan=_PP_PLAN,
            transforms=_TRANSFORMS,
            examples=("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V2.5"),
        ),
        ArchSpec(
            name="DeepseekV3ForCausalLM",
            target="modelbay_deepseek.model:DeepseekV3ForCausalLM",
            model_types=("deepseek_v3", "kimi_k2"),
            attention=("mla",),
            parallel=_PARALLEL,
            tp_plan=_LATENT_PLAN,
            pp_plan=_PP_PLAN,
            transforms=_TRANSFORMS,
            examples=("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "moonshotai/Kimi-K2-Instruct"),
        ),
    ]


@hookimpl
def register_config_classes() -> list[ConfigClassSpec]:
    classes = {
        "deepseek": "DeepseekConfig",
        "deepseek_v2": "DeepseekV2Config",
        "deepseek_v3": "DeepseekV3Config",
        "kimi_k2": "KimiK2Config",
    }
    return [
        ConfigClassSpec(model_type=model_type, target=f"modelbay_deepseek.config:{name}")
        for model_type, name in classes.items()
    ]


@hookimpl
def register_attention_kinds() -> list[AttentionKindSpec]:
    return [
        AttentionKindSpec(
            name="mla",
            target=_MLA,
            kv="modelbay_runtime.kv_spec:LatentKV",
            summary="every token, by one latent for all heads",
        )
    ]


@hookimpl
def register_kernels() -> list[KernelSpec]:
    return [KernelSpec(set="torch", op="attention.mla", target=_MLA, devices=("cpu", "cuda"), priority=0)]
