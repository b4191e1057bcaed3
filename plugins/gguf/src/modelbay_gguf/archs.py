"""The architectures read from GGUF, as data: Hugging Face's names for them, for their tensors and config keys.

Only those stand here whose every tensor is tested to come out as Transformers' own reader of GGUF gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelbay.errors import ConfigError

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DECODER = _NORMS | _ATTENTION | _GATED_MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArch:
    """One value of ``general.architecture``.

    Args:
        name: that value, which is also the prefix of its metadata keys.
        model_type, architecture: Hugging Face's names.
        layer: names of a layer's modules, GGUF's to Hugging Face's.
        keys: metadata keys (without prefix) to config keys, beyond those that Transformers' table has.
        head_dim: whether the config class has a ``head_dim`` of its own; else it is hidden size / heads.
        permuted: the rows of q and k are interleaved for ggml's rotary layout.
        norm_offset: what the file's norm weights have on top of Hugging Face's (Gemma's are stored as 1 + w).
        partial_rotary: the model may turn only a part of each head.
    """

    name: str
    model_type: str
    architecture: str
    layer: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    keys: Mapping[str, str] = field(default_factory=dict)
    head_dim: bool = False
    permuted: bool = False
    norm_offset: float = 0.0
    partial_rotary: bool = False


_ALL = (
    GgufArch(name="llama", model_type="llama", architecture="LlamaForCausalLM", head_dim=True, permuted=True),
    GgufArch(name="qwen2", model_type="qwen2", architecture="Qwen2ForCausalLM"),
    GgufArch(
        name="qwen3", model_type="qwen3", architecture="Qwen3ForCausalLM", layer=_DECODER | _QK_NORMS, head_dim=True
    ),
    GgufArch(
        name="phi3",
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        layer=_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        keys={"attention.sliding_window": "sliding_window"},
        partial_rotary=True,
    ),
    GgufArch(
        name="gemma2",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        layer=_GEMMA_NORMS | _ATTENTION | _GATED_MLP,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        head_dim=True,
        norm_offset=1.0,
    ),
    GgufArch(
        name="gemma3",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        layer=_GEMMA_NORMS | _ATTENTION | _QK_NORMS | _GATED_MLP,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        head_dim=True,
        norm_offset=1.0,
    ),
    GgufArch(
        name="starcoder2",
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        layer=_NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"attention.sliding_window": "sliding_window"},
    ),
    GgufArch(name="stablelm", model_type="stablelm", architecture="StableLmForCausalLM", partial_rotary=True),
)

ARCHS: Mapping[str, GgufArch] = {arch.name: arch for arch in _ALL}

# Mistral models are stored as "llama"; a config.json beside the file may say what they are.
_BY_MODEL_TYPE = {arch.model_type: arch for arch in _ALL} | {"mistral": ARCHS["llama"]}


def arch_named(name: str | None, where: str) -> GgufArch:
    """The architecture of a file whose ``general.architecture`` is ``name``.

    Raises:
        ConfigError: it is none of those supported.
    """
    if name is None or name not in ARCHS:
        raise ConfigError(f"{where} is a GGUF file of architecture {name!r}; supported: {', '.join(sorted(ARCHS))}.")
    return ARCHS[name]


def arch_of_model_type(model_type: str) -> GgufArch:
    """The architecture that a Hugging Face ``model_type`` is stored as.

    Raises:
        ConfigError: it is none of those supported.
    """
    if model_type not in _BY_MODEL_TYPE:
        raise ConfigError(
            f"the weights of model type {model_type!r} are not read from GGUF; "
            f"supported: {', '.join(sorted(_BY_MODEL_TYPE))}."
        )
    return _BY_MODEL_TYPE[model_type]
