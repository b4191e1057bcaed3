"""The official configs, built on meta: parameters and cache are what the papers count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelbay import resolve
from modelbay_runtime.build import BuiltModel, build_model
from modelbay_runtime.layers.moe import SparseMoE
from modelbay_runtime.parallel.holdings import holdings
from modelbay_runtime.parallel.mesh import Mesh


def yarn(mscale: float) -> dict:
    return {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": mscale, "mscale_all_dim": mscale,
    }  # fmt: skip


#: What the config.json of deepseek-ai/DeepSeek-V3 and DeepSeek-V2-Lite say that matters here.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": yarn(1.0),
    "num_nextn_predict_layers": 1, "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}  # fmt: skip
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": yarn(0.707),
}  # fmt: skip


def built(path: Path, config: dict) -> tuple[BuiltModel, dict[str, str]]:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    resolution = resolve(str(path), max_model_len=4096, device="cpu")
    model = build_model(resolution)
    return model, {decision.question: str(decision.answer) for decision in resolution.trace.decisions}


def counts(model: BuiltModel) -> tuple[int, int]:
    """All parameters, and those that one token's way goes through: all but the experts that it is not sent to, and
    the rows of the embedding that it does not look up."""
    everything = sum(p.numel() for p in model.module.parameters())
    idle = model.module.model.embed_tokens.weight.numel()
    for block in model.module.modules():
        if isinstance(block, SparseMoE):
            spec = block.gate.spec
            held = sum(p.numel() for p in block.experts.parameters())
            idle += held // spec.experts * (spec.experts - spec.top_k)
    return everything, everything - idle


def test_official_v3_has_671_billion_parameters_and_37_active(tmp_path: Path) -> None:
    model, said = built(tmp_path, V3)
    everything, active = counts(model)
    assert everything / 1e9 == pytest.approx(671.03, abs=0.01)
    assert active / 1e9 == pytest.approx(36.6, abs=0.05)
    assert (active + model.module.model.embed_tokens.weight.numel()) / 1e9 == pytest.approx(37.6, abs=0.05)
    assert said["cache"] == f"LatentKV(size=576) × 61 layers: {576 * 61 * 2:,} bytes per token"
    assert "fp8" in said["quantization method"]


def test_official_v3_kept_in_fp8_takes_a_byte_for_a_parameter(tmp_path: Path) -> None:
    """Scales are bytes and no parameters; embedding, head, routers and what attention absorbs have two or four."""
    (tmp_path / "config.json").write_text(json.dumps(V3), encoding="utf-8")
    resolution = resolve(str(tmp_path), max_model_len=4096, device="cpu", quantization="fp8")
    found = holdings(resolution, Mesh())
    assert found.parameters / 1e9 == pytest.approx(671.03, abs=0.01)
    [rank] = found.ranks
    twice = 2 * 129280 * 7168 + 61 * 128 * 256 * 512  # embedding and head, kv_b_proj
    scales = 4 * 671e9 / 128**2
    routers = 3 * 58 * 256 * 7168
    assert rank.weight_bytes == pytest.approx(found.parameters + twice + scales + routers, rel=2e-4)


def test_official_v2_lite_has_15_7_billion_parameters(tmp_path: Path) -> None:
    model, said = built(tmp_path, V2_LITE)
    everything, active = counts(model)
    assert everything / 1e9 == pytest.approx(15.7, abs=0.05)
    assert active / 1e9 == pytest.approx(2.4, abs=0.1)
    assert said["cache"] == f"LatentKV(size=576) × 27 layers: {576 * 27 * 2:,} bytes per token"
    # The scale of the softmax has the correction that cos and sin do not need.
    assert model.module.model.layers[0].self_attn.spec.scale == pytest.approx(192**-0.5 * 1.5896, rel=1e-4)


def test_kimi_k2_is_v3_with_other_sizes(tmp_path: Path) -> None:
    changed = {
        "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1, "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip
    model, said = built(tmp_path, {**V3, **changed})
    everything, active = counts(model)
    assert said["config class"] == "modelbay_deepseek.config.KimiK2Config"
    assert everything / 1e12 == pytest.approx(1.03, abs=0.01)
    assert active / 1e9 == pytest.approx(32, abs=1)


def test_official_v3_over_ranks_adds_up(tmp_path: Path) -> None:
    """D1: what all ranks hold, less copies, is the model; nothing is padded at these sizes."""
    (tmp_path / "config.json").write_text(json.dumps(V3), encoding="utf-8")
    resolution = resolve(str(tmp_path), max_model_len=4096, device="cpu")
    found = holdings(resolution, Mesh(dp=4, pp=2, tp=8, expert_parallel=True))
    assert found.parameters / 1e9 == pytest.approx(671.03, abs=0.01)
    assert sum(rank.parameters for rank in found.ranks) - found.copies == found.parameters
    assert found.padding == 0
    assert found.active is not None
    assert found.active.without_embedding / 1e9 == pytest.approx(36.6, abs=0.05)
    assert found.active.with_embedding / 1e9 == pytest.approx(37.6, abs=0.05)
    experts = [set(range(*rank.experts)) for rank in found.ranks if rank.experts and rank.stage == 0]
    assert set.union(*experts) == set(range(256))
    assert sum(map(len, experts)) == 256
    assert {rank.kv_bytes for rank in found.ranks} == {576 * 2 * 31, 576 * 2 * 30}  # the latent is whole on each
