"""What is replaced in a Transformers model, what is left alone and why; outputs stay what Transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modelbay import LLM
from modelbay.config import ModelConfig
from modelbay.plugins import load_plugins
from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels.table import KernelTable
from modelbay_testing.logits import engine_logits, transformers_logits, worst_difference
from modelbay_testing.tiny import tiny_checkpoint
from modelbay_transformers.fuse import FusedLayer
from modelbay_transformers.pack import Packed, Part
from modelbay_transformers.trials import replace_norms

PROMPTS = [[5], [7, 8, 9, 10, 11], list(range(3, 60))]


def load(path: Path, **kwargs: Any) -> LLM:
    return LLM(str(path), model_impl="transformers", dtype="float32", kv_cache_memory_bytes=1 << 22, **kwargs)


def context() -> BuildContext:
    cpu = torch.device("cpu")
    table = KernelTable(load_plugins(), cpu, torch.float32)
    return BuildContext(None, torch.float32, cpu, table)  # type: ignore[arg-type]


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "mistral with a window": ("mistral", {"sliding_window": 20}),
}
ALONE: dict[str, tuple[str, dict[str, Any], str]] = {
    "residual multiplier": ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.25}, "something else"),
    "layers without rotation": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": False}, "something else"),
    "norms of q and k": ("qwen3", {}, "further parameters"),
    "norms after": ("olmo2", {}, "parts are not"),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_standard_layer_runs_as_the_runtimes_block_and_gives_the_same(name: str, tmp_path: Path) -> None:
    model_type, overrides = FUSED[name]
    path = tiny_checkpoint(tmp_path, model_type, **overrides)
    with load(path, max_num_batched_tokens=24) as llm:
        fused = llm.apply_model(lambda model: sum(isinstance(part, FusedLayer) for part in model.modules()))
        found = engine_logits(llm, PROMPTS, output_tokens=6)
    assert fused == [2]
    expected = transformers_logits(path, [tokens for tokens, _ in found])
    assert worst_difference([logits for _, logits in found], expected) <= 1e-4


@pytest.mark.parametrize("name", ALONE)
def test_another_layer_is_left_alone_with_its_reason_and_gives_the_same(name: str, tmp_path: Path) -> None:
    model_type, overrides, reason = ALONE[name]
    path = tiny_checkpoint(tmp_path, model_type, **overrides)
    with load(path) as llm:
        decision = llm.resolution.trace.find("fused layers")
        found = engine_logits(llm, PROMPTS, output_tokens=6)
    assert decision is not None
    assert decision.answer < 2
    assert any(reason in item.reason for item in decision.rejected), decision.rejected
    expected = transformers_logits(path, [tokens for tokens, _ in found])
    assert worst_difference([logits for _, logits in found], expected) <= 1e-4


def test_a_layer_with_the_same_names_and_other_arithmetic_fails_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, shapes and settings of Llama, but the feed-forward adds where it should multiply."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    path = tiny_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))
    )
    with load(path) as llm:
        decision = llm.resolution.trace.find("fused layers")
        found = engine_logits(llm, PROMPTS)
    assert decision is not None
    assert decision.answer == 0
    expected = transformers_logits(path, [tokens for tokens, _ in found])
    assert worst_difference([logits for _, logits in found], expected) <= 1e-4


def packed_pair() -> tuple[Packed, Part, Part]:
    packed = Packed(context(), 8, {"a": 4, "b": 6}, bias=True)
    generator = torch.Generator().manual_seed(0)
    packed.weight = nn.Parameter(torch.randn(10, 8, generator=generator), requires_grad=False)
    packed.bias = nn.Parameter(torch.randn(10, generator=generator), requires_grad=False)
    packed.post_load()
    return packed, Part(packed, 0, 4), Part(packed, 4, 6)


def test_parts_share_one_product_of_one_tensor() -> None:
    packed, a, b = packed_pair()
    calls = []
    packed.register_forward_hook(lambda *args: calls.append(1))
    x = torch.randn(1, 3, 8)
    whole = packed(x)
    calls.clear()
    torch.testing.assert_close(torch.cat((a(x), b(x)), -1), whole)
    assert len(calls) == 1
    assert packed._output is None, "nothing is remembered once every part is taken"


def test_a_part_given_another_tensor_does_not_get_the_remembered_product() -> None:
    packed, a, b = packed_pair()
    x, y = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    a(x)
    torch.testing.assert_close(b(y), packed(y)[..., 4:])


def test_only_a_norm_that_multiplies_by_its_weight_alone_is_replaced() -> None:
    base = nn.ModuleDict(
        {"plain": LlamaRMSNorm(16, 1e-6), "one more": Gemma2RMSNorm(16, 1e-6), "layer": nn.LayerNorm(16)}
    )
    assert replace_norms(context(), base) == 1
    assert type(base["plain"]).__name__ == "AnyRMSNorm"
    assert isinstance(base["one more"], Gemma2RMSNorm)


def test_another_epsilon_than_the_blocks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a class that has its epsilon under a key that the block does not read."""
    path = tiny_checkpoint(tmp_path, "llama", rms_norm_eps=1e-5)
    get = ModelConfig.get

    def without_epsilon(self: ModelConfig, key: str, default: Any = None) -> Any:
        return default if key == "rms_norm_eps" else get(self, key, default)

    monkeypatch.setattr(ModelConfig, "get", without_epsilon)
    with load(path) as llm:
        decision = llm.resolution.trace.find("fused layers")
    assert decision is not None
    assert decision.answer == 0
    assert "something else" in decision.rejected[0].reason
