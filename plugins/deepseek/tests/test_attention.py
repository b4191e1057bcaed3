"""The kind "mla": two ways to attend that agree, the scale of the softmax, far positions, and what the cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay_deepseek import attention
from modelbay_deepseek.attention import LatentSpec, absorbed, absorbing_is_cheaper, expanded
from modelbay_runtime.kernels.attention import causal_mask
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip


def written_out(
    q: torch.Tensor, rows: torch.Tensor, start: int, spec: LatentSpec, weight: torch.Tensor
) -> torch.Tensor:
    """One sequence, token by token and head by head, in float64: q [t, N, D], rows [L, C + R] -> [t, N, E]."""
    q, rows, weight = q.double(), rows.double(), weight.double()
    out = q.new_zeros(*q.shape[:2], spec.v_head_size)
    for token in range(q.shape[0]):
        seen = rows[: start + token + 1]
        for head in range(spec.num_heads):
            made = seen[:, : spec.latent_size] @ weight[head].T
            key = torch.cat((made[:, : spec.nope_size], seen[:, spec.latent_size :]), 1)
            probabilities = torch.softmax(key @ q[token, head] * spec.scale, 0)
            out[token, head] = probabilities @ made[:, spec.nope_size :]
    return out.float()


@given(
    new=st.integers(1, 9), before=st.integers(0, 20), heads=st.integers(1, 5), nope=st.integers(1, 9),
    rope=st.sampled_from((2, 4)), value=st.integers(1, 20), latent=st.integers(1, 12),
    at_once=st.sampled_from((1, 1 << 26)),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_absorbed_equals_expanded_equals_written_out(
    new: int, before: int, heads: int, nope: int, rope: int, value: int, latent: int, at_once: int
) -> None:
    spec = LatentSpec(heads, nope, rope, value, latent, 0.3)
    generator = torch.Generator().manual_seed(new + 100 * before + heads)
    q = torch.randn(1, new, heads, nope + rope, generator=generator)
    rows = torch.randn(1, before + new, latent + rope, generator=generator)
    weight = torch.randn(heads, nope + value, latent, generator=generator)
    mask = causal_mask(new, before + new, 0, None, torch.float32, q.device) if before else None
    expected = written_out(q[0], rows[0], before, spec, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_EXPANDED", at_once)
        torch.testing.assert_close(expanded(q, rows, mask, spec, weight)[0], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(absorbed(q, rows, mask, spec, weight)[0], expected, atol=2e-5, rtol=1e-4)


def test_the_cheaper_way_is_chosen() -> None:
    """V3's sizes: a whole prompt is expanded, a few tokens behind a long context are absorbed."""
    spec = LatentSpec(128, 128, 64, 128, 512, 1.0)
    assert not any(absorbing_is_cheaper(length, length, spec) for length in (2, 100, 5000))
    assert absorbing_is_cheaper(1, 500, spec)
    assert absorbing_is_cheaper(16, 8000, spec)
    assert not absorbing_is_cheaper(2048, 8000, spec)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("way", ["absorbed", "expanded", "chosen"])
def test_either_way_gives_transformers_logits_in_chunks(
    model_type: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prefill over a cached context and a cached prefix, each way for itself."""
    from modelbay import LLM

    path = checkpoint(tmp_path, model_type)
    if way != "chosen":
        monkeypatch.setattr(attention, "absorbing_is_cheaper", lambda *args: way == "absorbed")
    prompt = torch.randint(3, 256, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(str(path), dtype="float32", max_num_batched_tokens=48, kv_cache_memory_bytes=1 << 22) as llm:
        first = engine_logits(llm, [prompt], output_tokens=4)
        again = engine_logits(llm, [prompt[:120] + [9] * 30], output_tokens=4)
    spared = int(again[0][1].isnan().all(-1).sum())
    assert 0 < spared <= 120, "the prefix was not taken from the cache"
    found = first + again
    expected = transformers_logits(path, [tokens for tokens, _ in found])
    assert worst_difference([logits for _, logits in found], expected) <= 1e-4


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_case_18_yarn_40_up_to_position_5000(model_type: str, tmp_path: Path) -> None:
    """Case 18: cos and sin have factor one, so that the softmax scale shows; position 0 alone could not show it."""
    from modelbay import LLM

    path = checkpoint(tmp_path, model_type, num_hidden_layers=2, std=0.15)
    prompt = torch.randint(3, 256, (4990,), generator=torch.Generator().manual_seed(4)).tolist()
    with LLM(str(path), dtype="float32", max_model_len=5120, kv_cache_memory_bytes=1 << 23) as llm:
        found = engine_logits(llm, [prompt], output_tokens=12)
        scale = llm.engine.model.model.layers[0].self_attn.spec.scale
        table = llm.engine.model.model.rotary_emb.table
    assert scale == pytest.approx(24**-0.5 * 1.5896, rel=1e-4)
    assert table[0, 0].tolist() == [1.0] * 8
    expected = transformers_logits(path, [tokens for tokens, _ in found])
    assert worst_difference([logits for _, logits in found], expected) <= 1e-4


def test_bytes_per_token_are_the_papers(tmp_path: Path) -> None:
    """A token keeps ``(d_c + d_h^R) l`` numbers: said by explain, and taken by the cache."""
    from modelbay import LLM

    path = checkpoint(tmp_path, "deepseek_v3")
    with LLM(str(path), dtype="bfloat16", kv_cache_memory_bytes=1 << 22) as llm:
        [said] = [str(d.answer) for d in llm.resolution.trace.decisions if d.question == "cache" and d.stage == "build"]
        cache, layout = llm.engine.runner.cache, llm.engine.kv.layout
    assert said == "LatentKV(size=40) × 3 layers: 240 bytes per token"
    tokens = cache.tensors[0].numel() // layout.page * layout.groups[0].block_size
    taken = sum(tensor.nbytes for tensor in cache.tensors)
    assert taken == tokens * (32 + 8) * 3 * 2


def checkpoint(path: Path, model_type: str, std: float = 0.3, **values: object) -> Path:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    groups = {"n_group": 2, "topk_group": 1} if model_type == "deepseek_v3" else {}
    sizes = {
        "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "max_position_embeddings": 5120,
        "rope_parameters": dict(YARN),
    }  # fmt: skip
    return tiny_checkpoint(path / "model", model_type, std=std, **{**sizes, **experts, **groups, **values})
