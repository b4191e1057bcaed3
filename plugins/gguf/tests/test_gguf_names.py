"""Names, row order and norms: every tensor of every architecture, against the model that was written and against
what Transformers' own reader makes of the file (W4)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q

from modelbay.errors import ConfigError
from modelbay.rope import RopeSpec
from modelbay.weights.names import make_pieces
from modelbay.weights.transforms import Ignore
from modelbay_gguf.archs import ARCHS, arch_named
from modelbay_gguf.config import read_config
from modelbay_gguf.names import transforms
from modelbay_gguf.weights import GgufSource
from modelbay_testing.records import apply_piece


def _facts(config: Any, **changes: Any) -> Any:
    """The facts that the transforms ask a ModelConfig for."""
    facts = {
        "model_type": config.model_type,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "hidden_size": config.hidden_size,
        "rope": {"default": RopeSpec("default", 10000.0, 16)},
    }
    return SimpleNamespace(**{**facts, **changes})


def _state(path: Any, config: Any) -> dict[str, torch.Tensor]:
    """What the loader would hand to the module, by Hugging Face's names."""
    facts = _facts(config)
    with GgufSource({path.name: path}) as source:
        pieces = make_pieces(source.entries(), transforms(facts), facts)
        return {piece.name: apply_piece(piece, source.read(piece.source)).float().clone() for piece in pieces}


def _transformers_state(path: Any) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_w4_float32_tensors_are_those_of_the_model_that_was_written(arch: str, write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf(arch)
    found, expected = _state(tiny.path, tiny.model.config), dict(tiny.model.state_dict())
    if tiny.model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # A norm stored as 1 + w loses the last bits of w in the file itself.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6 if ARCHS[arch].norm_offset else 0)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_w4_quantised_tensors_are_those_that_transformers_reads(arch: str, write_gguf: Callable[..., Any]) -> None:
    # Transformers takes every Qwen3 to have heads of 128.
    tiny = write_gguf(arch, Q.Q8_0, **({"head_dim": 128} if arch == "qwen3" else {}))
    found, expected = _state(tiny.path, tiny.model.config), _transformers_state(tiny.path)
    if tiny.model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_w4_biases_of_q_and_k_are_permuted_like_their_weights(write_gguf: Callable[..., Any]) -> None:
    tiny = write_gguf("llama", attention_bias=True)
    found, expected = _state(tiny.path, tiny.model.config), tiny.model.state_dict()
    assert read_config(tiny.path)["attention_bias"] is True
    for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
        assert torch.equal(found[f"model.layers.1.self_attn.{name}"], expected[f"model.layers.1.self_attn.{name}"])


def test_w4_factors_are_passed_over_only_if_the_config_carries_them(write_gguf: Callable[..., Any]) -> None:
    config = write_gguf().model.config

    def rules(kind: str) -> list[str]:
        facts = _facts(config, rope={"default": RopeSpec(kind, 10000.0, 16)})
        return [transform.pattern for transform in transforms(facts) if isinstance(transform, Ignore)]

    assert rules("default") == rules("linear") == []
    assert rules("llama3") == [r"^rope_freqs\.weight$"]
    assert rules("longrope") == [r"^rope_factors_(long|short)\.weight$"]


def test_a1_mistral_is_stored_as_llama(write_gguf: Callable[..., Any]) -> None:
    config = write_gguf().model.config
    assert transforms(_facts(config, model_type="mistral")) == transforms(_facts(config))


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="architecture 'mamba'; supported: gemma2, gemma3, llama"):
        arch_named("mamba", "x.gguf")
    with pytest.raises(ConfigError, match="'bloom' are not read from GGUF; supported: gemma2"):
        transforms(SimpleNamespace(model_type="bloom"))  # type: ignore[arg-type]
