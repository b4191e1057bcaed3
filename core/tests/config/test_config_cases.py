"""Reported cases of the config stage that have triggers of their own: 15 to 21."""

from __future__ import annotations

import math
from typing import Any

import pytest

from modelbay.errors import ConfigError
from modelbay.specs import ConfigClassSpec

PLAIN = "modelbay.config.plain:PlainConfig"


def test_c3_case_15_only_the_language_config_names_the_architecture(
    load: Any, plugin: Any, llama: dict[str, Any]
) -> None:
    spec = ConfigClassSpec(model_type="brook_vl", target=PLAIN)
    outer = {"model_type": "brook_vl", "architectures": None, "language_config": llama}
    config, _ = load(outer, [plugin("brook", register_config_classes=[spec])])
    assert config.architectures == ("LlamaForCausalLM",)
    assert config.sources["architectures"] == "config.json (language_config.architectures)"
    assert (config.text_path, config.hidden_size) == (("language_config",), 64)


def test_c2_case_15_a_type_that_nobody_has_is_named(load: Any, llama: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model_type 'foo': neither transformers \S+ nor the plugins searched"
    ):
        load(llama | {"model_type": "foo"})


@pytest.mark.parametrize("plugins", [[], ["llama"]])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_c5_case_16_theta_beside_the_scaling_and_through_an_override(
    load: Any, llama: dict[str, Any], plugins: list[str], spelling: str
) -> None:
    written = llama | {"rope_theta": 1e6, spelling: {"type": "linear", "factor": 4}}
    spec = load(written, plugins)[0].rope["default"]
    assert (spec.type, spec.theta, spec.parameters) == ("linear", 1e6, {"factor": 4})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for key in ("rope_scaling", "rope_parameters"):
        spec = load(written, plugins, hf_overrides={key: yarn})[0].rope["default"]
        assert (spec.type, spec.theta, spec.parameters["factor"]) == ("yarn", 1e6, 4.0)


def test_c5_case_16_layer_types_have_rope_of_their_own(load: Any) -> None:
    config, _ = load(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        }
    )
    full, sliding = config.rope_for("full"), config.rope_for("sliding")
    assert full is not None
    assert sliding is not None
    assert (full.type, full.theta, sliding.type, sliding.theta) == ("linear", 1e6, "default", 1e4)


@pytest.mark.parametrize("plugins", [[], ["llama"]])
@pytest.mark.parametrize("kind", ["yarn", "deepseek_yarn"])
def test_c7_case_17_a_length_that_is_scaled_already_stays(
    load: Any, llama: dict[str, Any], kind: str, plugins: list[str]
) -> None:
    """131072 with factor 40 is not 5242880, nor is it under an alias of yarn that nobody here knows."""
    rope = {"type": kind, "factor": 40, "original_max_position_embeddings": 4096}
    config, trace = load(llama | {"max_position_embeddings": 131072, "rope_scaling": rope}, plugins)
    assert config.max_model_len == 131072
    assert ("RoPE type of default layers" in [d.question for d in trace.warnings()]) is (kind != "yarn")


def test_c7_case_17_positions_of_an_encoder_are_not_cut_to_a_default(load: Any) -> None:
    """8194 rows; the tokenizer allows 8192. Nothing says 512."""
    encoder = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "max_position_embeddings": 8194}
    assert load(encoder, files={"tokenizer_config.json": {"model_max_length": 8192}})[0].max_model_len == 8192
    for limit in (1e30, None):
        config, _ = load(encoder, files={"tokenizer_config.json": {"model_max_length": limit}})
        assert config.max_model_len == 8194


def test_c5_case_18_both_mscales_reach_the_layers(load: Any) -> None:
    """Equal ones leave cos and sin alone and scale the softmax instead, by (0.1 × 0.707 × ln 40 + 1)² ≈ 1.59."""
    rope = {
        "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config, _ = load(
        {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "max_position_embeddings": 163840,
            "rope_scaling": rope,
        }
    )
    [spec] = config.rope.values()
    assert spec.parameters["mscale"] == spec.parameters["mscale_all_dim"] == 0.707
    assert (0.1 * spec.parameters["mscale_all_dim"] * math.log(spec.parameters["factor"]) + 1) ** 2 == pytest.approx(
        1.59, abs=0.005
    )
    assert config.max_model_len == 163840


def test_c8_case_21_the_outer_dtype_beats_a_text_config_in_float32(load: Any, llama: dict[str, Any]) -> None:
    outer = {"model_type": "llava", "architectures": ["X"], "torch_dtype": None, "dtype": "bfloat16"}
    config, trace = load(outer | {"text_config": llama | {"torch_dtype": "float32"}})
    assert (config.dtype, config.checkpoint_dtype) == ("bfloat16", "bfloat16")
    assert any(decision.question == "dtype of text_config" for decision in trace.warnings())
