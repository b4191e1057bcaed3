"""Inverse frequencies of every RoPE type, and the factor on cos and sin, fixed per instance.

Formulas: Su et al. 2021 (default), Chen et al. 2023 (linear), bloc97 2023 (dynamic NTK), Peng et al. 2023 (yarn),
Ding et al. 2024 (longrope), Grattafiori et al. 2024 (llama3). Legend: R rotary dimensions; results are [R / 2].
"""

from __future__ import annotations

import math

import torch

from modelbay.errors import ConfigError
from modelbay.rope import RopeSpec


def inverse_frequencies(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    """``(inv_freq [R / 2] float32, attention factor)``.

    Types whose factors depend on the longest position (dynamic, longrope) are fixed by ``max_model_len``, so that a
    request never depends on its neighbours.

    Args:
        trained_len: the model's own maximum, used where the parameters do not name the original one.

    Raises:
        ConfigError: a type that is not known here.
    """
    functions = {
        "default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope,
        "llama3": _llama3,
    }  # fmt: skip
    function = functions.get(rope.type)
    if function is None:
        raise ConfigError(f"rope_type {rope.type!r} is not supported; supported: {', '.join(sorted(functions))}.")
    return function(rope, max_model_len, trained_len)


def _base(rope: RopeSpec, theta: float | None = None) -> torch.Tensor:
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    return 1.0 / ((theta or rope.theta) ** exponent)


def _default(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    return _base(rope), 1.0


def _linear(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    return _base(rope) / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    original = rope.parameters.get("original_max_position_embeddings") or trained_len
    factor, dim = rope.parameters["factor"], rope.rotary_dim
    length = max(max_model_len, original)
    theta = rope.theta * ((factor * length / original) - (factor - 1)) ** (dim / (dim - 2))
    return _base(rope, theta), 1.0


def _yarn(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    parameters, dim = rope.parameters, rope.rotary_dim
    factor = parameters["factor"]
    original = parameters.get("original_max_position_embeddings") or trained_len
    attention_factor = parameters.get("attention_factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor)

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(parameters.get("beta_fast") or 32), correction(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = _base(rope)
    return extrapolated / factor * ramp + extrapolated * (1 - ramp), float(attention_factor)


def yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    """``0.1 * mscale * ln(scale) + 1`` (Peng et al. 2023, section 3.4)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _longrope(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    parameters = rope.parameters
    original = parameters.get("original_max_position_embeddings") or trained_len
    factor = parameters.get("factor") or max(1.0, trained_len / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scales = parameters["long_factor"] if max_model_len > original else parameters["short_factor"]
    return _base(rope) / torch.tensor(scales, dtype=torch.float32), float(attention_factor)


def _llama3(rope: RopeSpec, max_model_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    parameters = rope.parameters
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    inv_freq = _base(rope)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    result = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(medium, mixed, result), 1.0
