"""What Transformers has no class for: the first models, and experts in every other layer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelbay import LLM
from modelbay_testing.logits import engine_logits
from modelbay_testing.tiny import tiny_tokenizer

EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "norm_topk_prob": False,
}  # fmt: skip
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def v2_blocks() -> tuple[Any, Any]:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

    sizes = {name: value for name, value in (SIZES | EXPERTS).items() if name != "rope_theta"}
    return v2, DeepseekV2Config(
        **sizes, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    )


def save(path: Path, model: torch.nn.Module, **config: object) -> Path:
    """As the hub has them: experts one by one."""
    path.mkdir()
    tensors = {}
    for name, value in model.state_dict().items():
        packed = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if packed is None:
            tensors[name] = value
            continue
        for index, weight in enumerate(value):
            parts = {"down_proj": weight}
            if packed[2] == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            tensors |= {f"{packed[1]}.{index}.{part}.weight": piece for part, piece in parts.items()}
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**SIZES, **config, "torch_dtype": "float32"}), encoding="utf-8")
    return tiny_tokenizer(path)


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(mean, 0.2, generator=generator)


def check(path: Path, model: torch.nn.Module) -> Any:
    prompt = torch.randint(3, 256, (70,), generator=torch.Generator().manual_seed(6)).tolist()
    with LLM(str(path), dtype="float32", max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 22) as llm:
        assert llm.resolution.backend == "native"
        [(tokens, logits)] = engine_logits(llm, [prompt], output_tokens=8)
        with torch.inference_mode():
            expected = model.eval()(torch.tensor([tokens[:-1]])).logits[0]
        assert (logits - expected).abs().max() <= 1e-4
        return [type(layer.mlp).__name__ for layer in llm.engine.model.model.layers]


@pytest.mark.parametrize("normalised", [False, True])
def test_first_models_are_llama_with_experts(normalised: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    v2, config = v2_blocks()
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for layer in model.model.layers[1:]:
        layer.mlp = v2.DeepseekV2Moe(config)
        if normalised:
            layer.mlp.gate.register_forward_hook(
                lambda module, args, out: (out[0], out[1] / out[1].sum(-1, keepdim=True), out[2])
            )
    randomise(model)
    names = {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"]}
    path = save(tmp_path / "model", model, **names, **{**EXPERTS, "norm_topk_prob": normalised})
    assert check(path, model) == ["GatedMLP", *["SparseMoE"] * 3]


def test_first_model_without_experts_is_llama(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    randomise(model)
    path = save(tmp_path / "model", model, model_type="deepseek", architectures=["DeepseekForCausalLM"])
    assert check(path, model) == ["GatedMLP"] * 4


def test_experts_in_every_other_layer(tmp_path: Path) -> None:
    """``moe_layer_freq``: layers that it divides have experts, from ``first_k_dense_replace`` on."""
    v2, config = v2_blocks()
    model = v2.DeepseekV2ForCausalLM(config)
    model.model.layers[1].mlp, model.model.layers[3].mlp = v2.DeepseekV2MLP(config), v2.DeepseekV2MLP(config)
    randomise(model)
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    own = {name: getattr(config, name) for name in names}
    own |= {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "moe_layer_freq": 2}
    path = save(tmp_path / "model", model, **EXPERTS, **own)
    assert check(path, model) == ["GatedMLP", "GatedMLP", "SparseMoE", "GatedMLP"]
