"""C5: RoPE's one normal form. The frequencies themselves are the layers' business; here it is what they are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelbay.config.overrides import merge
from modelbay.errors import ConfigError
from modelbay.rope import RopeDefaults, canonical, canonical_config, rope_specs

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def specs(parameters, head_size=64, **defaults):
    return rope_specs(canonical(parameters), RopeDefaults(**defaults), head_size)


@pytest.mark.parametrize(
    ("written", "rope_type"),
    [
        ({"type": "linear", "factor": 4}, "linear"),
        ({"rope_type": "linear", "factor": 4}, "linear"),
        ({"type": "linear", "rope_type": "linear", "factor": 4}, "linear"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "su", "rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "default"),
        ({"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]}, "default"),
        ({}, "default"),
    ],
)
def test_c5_types_under_either_name(written, rope_type) -> None:
    """Case 16."""
    assert specs(written, length=512)["default"].type == rope_type


def test_c5_two_different_types_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"type='linear' and rope_type='yarn'"):
        canonical({"type": "linear", "rope_type": "yarn", "factor": 2})


def test_c5_mrope_keeps_its_section_and_needs_it() -> None:
    assert specs({"type": "mrope", "mrope_section": [16, 24, 24]})["default"].parameters == {
        "mrope_section": [16, 24, 24]
    }
    with pytest.raises(ConfigError, match="mrope_section"):
        canonical({"type": "mrope"})


def test_c5_nested_theta_beats_the_default_and_the_default_beats_nothing() -> None:
    """Case 16."""
    assert specs({"rope_theta": 1e6}, theta=1e4)["default"].theta == 1e6
    assert specs({"rope_type": "linear", "factor": 2.0}, theta=5e5)["default"].theta == 5e5
    assert specs({})["default"].theta == 10_000.0


def test_c5_partial_rotation() -> None:
    assert specs({"partial_rotary_factor": 0.25})["default"].rotary_dim == 16
    assert specs({}, partial=0.5)["default"].rotary_dim == 32
    assert specs({}, rotary_dim=20)["default"].rotary_dim == 20
    with pytest.raises(ConfigError, match="turns 128 of 64"):
        specs({"partial_rotary_factor": 2.0})


def test_c5_per_layer_type() -> None:
    """Case 16."""
    written = {
        "full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "chunked_attention": None,
    }
    found = specs(written)
    assert {kind: (spec.type, spec.theta) for kind, spec in found.items()} == {
        "full": ("linear", 1e6),
        "sliding": ("default", 1e4),
    }


@pytest.mark.parametrize(
    ("written", "lacks"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "llama3", "factor": 8.0}, "low_freq_factor, high_freq_factor"),
        ({"type": "longrope", "short_factor": [1]}, "long_factor"),
    ],
)
def test_c5_what_a_type_needs(written, lacks) -> None:
    with pytest.raises(ConfigError, match=f"lacks {lacks}"):
        specs(written, length=512)


def test_c5_original_length() -> None:
    def original(parameters, **defaults):
        return specs(parameters, **defaults)["default"].parameters["original_max_position_embeddings"]

    assert original(YARN, length=512) == 128
    assert original({"rope_type": "yarn", "factor": 4.0}, length=512) == 512
    assert original(YARN, length=512, original_length=256) == 256  # as Phi-3 writes it, beside the object


@pytest.mark.parametrize("theta", [0, -1.0, "10000"])
def test_c5_theta_must_be_positive(theta) -> None:
    with pytest.raises(ConfigError, match="rope_theta"):
        specs({"rope_theta": theta} if theta else {}, theta=-1.0)


def test_c5_both_objects_in_one_config() -> None:
    config = {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2}}
    canonical_config(config)
    assert config == {"rope_parameters": {"rope_theta": 5.0, "rope_type": "linear", "factor": 2}}
    with pytest.raises(ConfigError, match="disagree on factor"):
        canonical_config({"rope_parameters": {"factor": 3}, "rope_scaling": {"factor": 2}})


# -- overrides


def test_override_keeps_the_theta_whichever_names_are_used() -> None:
    """Case 16."""
    for ours in ("rope_parameters", "rope_scaling"):
        for theirs in ("rope_parameters", "rope_scaling"):
            merged = merge({ours: {"rope_type": "default", "rope_theta": 1e6}}, {theirs: YARN})
            assert merged == {ours: {**YARN, "rope_theta": 1e6}}


def test_override_of_the_type_replaces_it_under_either_name() -> None:
    merged = merge({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "dynamic"}})
    assert canonical(merged["rope_scaling"]) == {"rope_type": "dynamic", "factor": 2.0}


def test_override_of_the_theta_reaches_the_one_inside() -> None:
    raw = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert merge(raw, {"rope_theta": 7.0})["rope_parameters"]["rope_theta"] == 7.0
    assert raw["rope_parameters"]["rope_theta"] == 1e4
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}}
    assert merge(nested, {"rope_theta": 7.0})["rope_parameters"]["sliding_attention"] == {"rope_theta": 7.0}


def test_override_null_takes_the_scaling_away_and_leaves_the_theta() -> None:
    raw = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}
    assert merge(raw, {"rope_scaling": None})["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


@given(
    st.dictionaries(st.sampled_from(["factor", "rope_theta", "beta_fast", "x"]), st.none() | st.floats(1, 9)),
    st.sampled_from([{}, {"type": "linear"}, {"rope_type": "yarn"}, {"type": "su"}]),
)
def test_canonical_is_idempotent_and_has_no_nulls(values, kind) -> None:
    once = canonical({**values, **kind})
    assert canonical(once) == once
    assert None not in once.values()
    assert "type" not in once


# -- through the config stage, against Transformers


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7e4}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
)
def test_c5_own_class_and_transformers_class_agree(rope, tmp_path) -> None:
    import json

    from transformers import LlamaConfig

    from modelbay.args import EngineArgs
    from modelbay.config import load_config
    from modelbay.plugins import load_plugins
    from modelbay.source import find_files
    from modelbay.trace import Trace

    values = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
    values |= {"max_position_embeddings": 512, **rope}
    (tmp_path / "config.json").write_text(json.dumps(values))
    args, trace = EngineArgs(model=str(tmp_path), device="cpu"), Trace()
    files = find_files(args.model, trace=trace)
    own = load_config(files, load_plugins(["llama"]), args, trace)
    theirs = load_config(files, load_plugins([]), args, trace)
    assert type(own.hf) is not type(theirs.hf)
    assert own.rope == theirs.rope
    expected = LlamaConfig(**json.loads(json.dumps(values))).rope_parameters
    spec = own.rope["default"]
    assert {"rope_type": spec.type, "rope_theta": spec.theta, **spec.parameters} == {
        key: value for key, value in expected.items() if key not in ("type", "partial_rotary_factor")
    }
