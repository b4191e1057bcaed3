"""What modelbay-qwen2 adds: Qwen2 and Qwen2.5. Imports nothing heavy."""

from __future__ import annotations

from modelbay import hookimpl
from modelbay.specs import ArchSpec, ConfigClassSpec


@hookimpl
def register_architectures() -> list[ArchSpec]:
    return [
        ArchSpec(
            name="Qwen2ForCausalLM",
            target="modelbay_qwen2.model:Qwen2ForCausalLM",
            model_types=("qwen2",),
            attention=("full", "sliding"),
            parallel=("tp", "pp", "dp"),
            tp_plan={
                "embed_tokens": "embedding_rowwise",
                "layers.*.self_attn.q_proj": "colwise",
                "layers.*.self_attn.k_proj": "colwise",
                "layers.*.self_attn.v_proj": "colwise",
                "layers.*.self_attn.o_proj": "rowwise",
                "layers.*.mlp.gate_proj": "colwise",
                "layers.*.mlp.up_proj": "colwise",
                "layers.*.mlp.down_proj": "rowwise",
                "lm_head": "colwise_gather_output",
            },
            pp_plan={
                "embed_tokens": (["input_ids"], ["inputs_embeds"]),
                "layers": (["hidden_states"], ["hidden_states"]),
                "norm": (["hidden_states"], ["hidden_states"]),
            },
            examples=("Qwen/Qwen2-7B", "Qwen/Qwen2.5-0.5B-Instruct"),
        )
    ]


@hookimpl
def register_config_classes() -> list[ConfigClassSpec]:
    return [ConfigClassSpec(model_type="qwen2", target="modelbay_qwen2.config:Qwen2Config")]
