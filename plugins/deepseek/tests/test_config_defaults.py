"""The defaults that this family's config classes state are Transformers' own, where it has the class."""

from __future__ import annotations

import json

import pytest

from modelbay_deepseek.config import DeepseekConfig, DeepseekV2Config, DeepseekV3Config, KimiK2Config
from modelbay_testing.records import class_defaults

#: What Transformers' classes leave out: the official classes' defaults, where not having them means them.
OFFICIAL = {
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "rope_interleave": True},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}


def theirs(model_type: str) -> dict:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    fields = {name: field.default for name, field in cls.__dataclass_fields__.items()}
    return fields | {"rope_theta": cls().rope_parameters["rope_theta"]} | OFFICIAL[model_type]


@pytest.mark.parametrize("cls", [DeepseekV2Config, DeepseekV3Config])
def test_every_stated_default_is_transformers_own(cls) -> None:
    reference = theirs(cls.model_type)
    stated = class_defaults(cls)
    assert stated == {name: reference[name] for name in stated}
    assert {"vocab_size", "kv_lora_rank", "n_group", "routed_scaling_factor", "rope_theta"} <= set(stated)
    own = cls()
    assert own.head_dim == reference["qk_rope_head_dim"]
    assert own.layer_types == ["mla"] * reference["num_hidden_layers"]


@pytest.mark.parametrize("cls", [DeepseekConfig, DeepseekV2Config, DeepseekV3Config])
def test_json_wins_over_the_defaults(cls) -> None:
    values = {name: _another(value) for name, value in class_defaults(cls).items()}
    config = cls(**json.loads(json.dumps(values)))
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize("cls", [DeepseekV2Config, DeepseekV3Config, KimiK2Config])
def test_null_says_that_there_is_none(cls) -> None:
    """V2-Lite's ``q_lora_rank`` is null: the queries have no low rank, whatever the class's default."""
    config = cls(q_lora_rank=None, n_routed_experts=None, n_shared_experts=None, kv_lora_rank=None)
    assert (config.q_lora_rank, config.n_routed_experts, config.n_shared_experts) == (None, None, None)
    assert config.kv_lora_rank == cls.kv_lora_rank


def _another(default: object) -> object:
    """A value of the type of a default that is none."""
    return not default if isinstance(default, bool) else "another" if isinstance(default, str) else 7
