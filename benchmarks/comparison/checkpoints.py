"""A checkpoint of a real model's shape with random weights, for when only speed is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN2_HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def qwen2_config(**overrides: Any) -> Any:
    """Transformers' config of the 0.5B model, with other values where they are given."""
    from transformers import Qwen2Config

    values = {**QWEN2_HALF_BILLION, **overrides}
    rope = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    return Qwen2Config(**values, rope_parameters=rope, dtype="bfloat16")


def make_qwen2(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random bfloat16 Qwen2ForCausalLM of the 0.5B model's shape, with a small tokenizer.

    Args:
        folder: must not exist yet, or be empty.
        overrides: config values other than those of the 0.5B model.

    Raises:
        FileExistsError: there is something in ``folder``.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    from modelbay_testing.tiny import tiny_tokenizer

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    config = qwen2_config(**overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer(folder, add_bos=False, model_max_length=config.max_position_embeddings)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}) + "\n")
    return folder


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    """A directory with this config.json and nothing else: enough to be explained."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return folder


_SMALL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_SMALL}
OLMO2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **_SMALL}

#: What deepseek-ai/DeepSeek-V3's config.json says.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
