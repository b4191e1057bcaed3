"""What modelbay-llama adds: Llama and Mistral. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import ArchSpec, ConfigClassSpec, ConfigPatch

_PARALLEL = ("tp", "pp", "dp")
_TP_PLAN = {
    "embed_tokens": "embedding_rowwise",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_PP_PLAN = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}


@hookimpl
def register_architectures() -> list[ArchSpec]:
    return [
        ArchSpec(
            name="LlamaForCausalLM",
            target="modelbay_llama.model:LlamaForCausalLM",
            model_types=("llama",),
            parallel=_PARALLEL,
            tp_plan=_TP_PLAN,
            pp_plan=_PP_PLAN,
            examples=("meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "01-ai/Yi-1.5-9B"),
        ),
        ArchSpec(
            name="MistralForCausalLM",
            target="modelbay_llama.model:MistralForCausalLM",
            model_types=("mistral",),
            attention=("full", "sliding"),
            parallel=_PARALLEL,
            tp_plan=_TP_PLAN,
            pp_plan=_PP_PLAN,
            examples=("mistralai/Mistral-7B-Instruct-v0.3",),
        ),
    ]


@hookimpl
def register_config_classes() -> list[ConfigClassSpec]:
    return [
        ConfigClassSpec(model_type="llama", target="modelbay_llama.config:LlamaConfig"),
        ConfigClassSpec(model_type="mistral", target="modelbay_llama.config:MistralConfig"),
    ]


@hookimpl
def register_config_patches() -> list[ConfigPatch]:
    return [
        ConfigPatch(
            name="llama-first-conversions",
            target="modelbay_llama.patches:first_conversions",
            model_types=("llama",),
        )
    ]
