"""Inverse frequencies and the rotation, against Transformers' own, in float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from modelbay.errors import ConfigError
from modelbay.rope import RopeSpec
from modelbay_runtime.kernels.ops import rotary
from modelbay_runtime.layers.rotary import Rotary
from modelbay_runtime.layers.rotary_frequencies import inverse_frequencies

TRAINED, DIM = 512, 32
_HALF = DIM // 2
TYPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 0.707, "mscale_all_dim": 0.707,
        "beta_fast": 32, "beta_slow": 1,
    },
    "yarn-untruncated": {
        "factor": 32.0, "original_max_position_embeddings": 128, "truncate": False, "attention_factor": 1.25,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 128, "short_factor": [1.0 + i / 10 for i in range(_HALF)],
        "long_factor": [2.0 + i / 5 for i in range(_HALF)],
    },
}  # fmt: skip


def _transformers(rope_type: str, parameters: dict, seq_len: int | None) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("length", [64, TRAINED])
def test_inverse_frequencies_equal_transformers(name: str, length: int) -> None:
    rope_type = name.partition("-")[0]
    expected, expected_factor = _transformers(rope_type, TYPES[name], length)
    found, factor = inverse_frequencies(RopeSpec(rope_type, 10000.0, DIM, TYPES[name]), length, TRAINED)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


@pytest.mark.parametrize("length", [TRAINED, 4 * TRAINED])
def test_dynamic_is_fixed_by_the_instances_longest_position(length: int) -> None:
    expected, _ = _transformers("dynamic", {"factor": 2.0}, length)
    found, _ = inverse_frequencies(RopeSpec("dynamic", 10000.0, DIM, {"factor": 2.0}), length, TRAINED)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_case_18_yarn_of_deepseek_leaves_cos_and_sin_unscaled() -> None:
    _, factor = inverse_frequencies(RopeSpec("yarn", 10000.0, DIM, TYPES["yarn-mscale"]), TRAINED, TRAINED)
    assert factor == 1.0


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'spiral'"):
        inverse_frequencies(RopeSpec("spiral", 10000.0, DIM), TRAINED, TRAINED)


@pytest.mark.parametrize("rotary_dim", [DIM, DIM // 2])
def test_rotation_equals_transformers_at_far_positions(rotary_dim: int) -> None:
    positions = torch.tensor([0, 1, 77, 511])
    heads = torch.randn(len(positions), 3, DIM, generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(hidden_size=4 * rotary_dim, num_attention_heads=4, max_position_embeddings=TRAINED)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected = heads.clone()
    turning = heads[None, ..., :rotary_dim].transpose(1, 2)
    turned, _ = apply_rotary_pos_emb(turning, turning, cos, sin)
    expected[..., :rotary_dim] = turned.transpose(1, 2)[0]

    inv_freq, factor = inverse_frequencies(RopeSpec("default", 10000.0, rotary_dim), TRAINED, TRAINED)
    angles = torch.outer(positions.float(), inv_freq)
    ours_cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None] * factor
    ours_sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None] * factor
    found = heads.clone()
    rotary(found, ours_cos, ours_sin)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "served"), [("dynamic", 2 * TRAINED), ("longrope", 64)])
def test_factors_follow_the_length_the_model_was_made_for_not_the_one_served(name: str, served: int) -> None:
    parameters = {k: v for k, v in TYPES.get(name, {"factor": 2.0}).items() if name == "dynamic" or k != "factor"}
    expected, factor = _transformers(name, parameters, served)
    config = SimpleNamespace(max_model_len=served, get={"max_position_embeddings": TRAINED}.get)
    build: Any = SimpleNamespace(config=config, device="cpu", dtype=torch.float32, max_model_len=served)
    cos, _ = Rotary(build, RopeSpec(name, 10000.0, DIM, parameters))(torch.tensor([served - 1]))
    torch.testing.assert_close(cos[0, 0, :_HALF], (expected * (served - 1)).cos() * factor, rtol=1e-4, atol=1e-4)
