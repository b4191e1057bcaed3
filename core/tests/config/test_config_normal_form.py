"""Any order and mixture of old and new keys gives the same facts, and doing it twice changes nothing (C5, C6, C8)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelbay.args import EngineArgs
from modelbay.config import ModelConfig, load_config
from modelbay.plugins import Plugins, load_plugins
from modelbay.source import ModelFiles, find_files
from modelbay.trace import Trace

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
]
THETA_KEYS = ["rope_theta", "rotary_emb_base"]
PARTIAL_KEYS = ["partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"]
#: Keys that old and new configs have as null: the same as absent.
NULLS = ["rope_scaling", "rope_parameters", "head_dim", "torch_dtype", "dtype", *THETA_KEYS, "sliding_window"]
#: Facts that do not say how they were spelled.
FACTS = [f.name for f in dataclasses.fields(ModelConfig) if f.name not in ("raw", "hf", "text", "sources", "origins")]


@dataclasses.dataclass(frozen=True)
class Meaning:
    theta: float
    scaling: tuple[str, dict[str, Any]]
    partial: float | None
    dtype: str
    head_dim: int | None

    def canonical(self) -> dict[str, Any]:
        kind, parameters = self.scaling
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": self.theta, **parameters}
        if self.partial is not None:
            rope["partial_rotary_factor"] = self.partial
        written = {**SIZES, "rope_parameters": rope, "dtype": self.dtype}
        return written | ({"head_dim": self.head_dim} if self.head_dim else {})


meanings = st.builds(
    Meaning,
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    scaling=st.sampled_from(SCALINGS),
    partial=st.sampled_from([None, 0.5, 0.25]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    head_dim=st.sampled_from([None, 32]),
)


@st.composite
def spelled(draw: st.DrawFn, meaning: Meaning) -> dict[str, Any]:
    """One way to write this meaning, keys in any order."""
    written: dict[str, Any] = dict(SIZES)
    rope: dict[str, Any] = dict(meaning.scaling[1])
    kind = meaning.scaling[0]
    for key in draw(st.sampled_from([("type",), ("rope_type",), ("type", "rope_type")])):
        rope[key] = kind
    if draw(st.booleans()):
        rope["rope_theta"] = meaning.theta
    else:
        written[draw(st.sampled_from(THETA_KEYS))] = meaning.theta
    if meaning.partial is not None:
        if draw(st.booleans()):
            rope["partial_rotary_factor"] = meaning.partial
        else:
            written[draw(st.sampled_from(PARTIAL_KEYS))] = meaning.partial
    if kind != "default" or "rope_theta" in rope or "partial_rotary_factor" in rope or draw(st.booleans()):
        place = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
        written[place] = {key: rope[key] for key in draw(st.permutations(list(rope)))}
    dtype = draw(st.sampled_from([meaning.dtype, f"torch.{meaning.dtype}"]))
    written[draw(st.sampled_from(["dtype", "torch_dtype"]))] = dtype
    if meaning.head_dim:
        written["head_dim"] = meaning.head_dim
    for key in draw(st.lists(st.sampled_from(NULLS), unique=True)):
        written.setdefault(key, None)
    return {key: written[key] for key in draw(st.permutations(list(written)))}


class Reader:
    """The config stage on a directory whose config.json changes."""

    def __init__(self, folder: Path, plugins: Plugins) -> None:
        self.folder, self.plugins = folder, plugins
        (folder / "config.json").write_text("{}")
        self.files: ModelFiles = find_files(str(folder), trace=Trace())
        self.args = EngineArgs.create(str(folder), device="cpu")

    def __call__(self, config: dict[str, Any]) -> ModelConfig:
        (self.folder / "config.json").write_text(json.dumps(config))
        return load_config(self.files, self.plugins, self.args, Trace())


def facts(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in FACTS}


@pytest.fixture(params=["own class", "Transformers' class"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    monkeypatch.setenv("MODELBAY_PLUGINS", "")
    return Reader(tmp_path, load_plugins(["llama"] if request.param == "own class" else []))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), meaning=meanings)
def test_c5_any_order_and_mixture_of_keys_gives_the_same_facts(
    read: Reader, data: st.DataObject, meaning: Meaning
) -> None:
    """Case 16: old keys and new ones, in any order."""
    expected = facts(read(meaning.canonical()))
    written = data.draw(spelled(meaning))
    found = read(written)
    assert facts(found) == expected
    assert found.rope["default"].theta == meaning.theta
    assert found.rope["default"].type == meaning.scaling[0]
    # Twice is as once: what the stage made of the config is a config that means the same.
    again = read(json.loads(json.dumps(found.raw)))
    assert facts(again) == expected
    assert again.raw == found.raw


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), meaning=meanings, theta=st.sampled_from([2e4, 3e6]))
def test_c5_overrides_change_what_they_name_however_the_config_spells_it(
    read: Reader, data: st.DataObject, meaning: Meaning, theta: float
) -> None:
    written = data.draw(spelled(meaning))
    read.args = EngineArgs.create(str(read.folder), device="cpu", hf_overrides={"rope_theta": theta})
    found = facts(read(written))
    read.args = EngineArgs.create(str(read.folder), device="cpu")
    assert found == facts(read(dataclasses.replace(meaning, theta=theta).canonical()))
