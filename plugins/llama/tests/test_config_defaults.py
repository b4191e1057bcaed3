"""The defaults that this family's config classes state are Transformers' own."""

from __future__ import annotations

import json

import pytest

from modelbay_llama.config import LlamaConfig, MistralConfig
from modelbay_testing.records import class_defaults


def theirs(model_type: str) -> dict:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    fields = {name: field.default for name, field in cls.__dataclass_fields__.items()}
    return fields | {"rope_theta": cls().rope_parameters["rope_theta"]}


@pytest.mark.parametrize("cls", [LlamaConfig, MistralConfig])
def test_every_stated_default_is_transformers_own(cls) -> None:
    reference = theirs(cls.model_type)
    stated = class_defaults(cls)
    assert stated == {name: reference[name] for name in stated}
    assert {"vocab_size", "hidden_size", "num_key_value_heads", "max_position_embeddings", "rope_theta"} <= set(stated)


@pytest.mark.parametrize("cls", [LlamaConfig, MistralConfig])
def test_json_wins_over_the_defaults(cls) -> None:
    values = {name: _another(value) for name, value in class_defaults(cls).items()}
    config = cls(**json.loads(json.dumps(values)))
    assert {name: getattr(config, name) for name in values} == values


def _another(default: object) -> object:
    """A value of the type of a default that is none."""
    return not default if isinstance(default, bool) else "another" if isinstance(default, str) else 7
