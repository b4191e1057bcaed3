"""Rotary position embedding: GGUF's metadata and factor tensors to Hugging Face's ``rope_parameters``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelbay.errors import ConfigError
from modelbay_gguf.header import Header

DEFAULT_BASE = 10000.0  # ggml's, where the metadata does not say
#: Original length, low and high frequency factor of every llama3-scaled model published so far. The file stores
#: only their effect; a file with other values does not reproduce and is refused.
LLAMA3_DEFAULTS = (8192, 1.0, 4.0)


def rope_parameters(
    header: Header, facts: Mapping[str, Any], head_dim: int, rotary_dim: int, tensors: Sequence[Header]
) -> dict[str, Any]:
    """The model's ``rope_parameters``.

    Args:
        facts: the metadata of the architecture without its prefix; what is used here is read, not removed.
        head_dim, rotary_dim: how many values a head has, and how many of them turn.
        tensors: the headers of all shards, where factor tensors may stand.

    Raises:
        ConfigError: a scaling that has no form in Hugging Face's config.
    """
    base = facts.get("rope.freq_base", DEFAULT_BASE)
    parameters = {"rope_theta": base, **_scaling(header, facts)}
    if rotary_dim != head_dim:
        parameters["partial_rotary_factor"] = rotary_dim / head_dim
    factors = {name: _floats(tensors, f"rope_{name}.weight") for name in ("freqs", "factors_long", "factors_short")}
    if factors["freqs"] is not None:
        parameters |= _llama3(header, parameters, factors["freqs"], rotary_dim, facts)
    if factors["factors_long"] is not None or factors["factors_short"] is not None:
        parameters |= _longrope(header, parameters, factors, facts)
    elif parameters["rope_type"] == "longrope":
        raise ConfigError(f"{header.path} says longrope, but holds no rope_factors_long.weight.")
    kind, attention = parameters["rope_type"], facts.get("rope.scaling.attn_factor", 1.0)
    if kind != "longrope" and attention != 1.0:
        raise ConfigError(f"{header.path} has rope.scaling.attn_factor {attention} with {kind} RoPE: not supported.")
    return parameters


def _scaling(header: Header, facts: Mapping[str, Any]) -> dict[str, Any]:
    kind = facts.get("rope.scaling.type", "linear" if "rope.scale_linear" in facts else "none")
    factor = facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": facts.get("rope.scaling.original_context_length"),
            "beta_fast": facts.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": facts.get("rope.scaling.yarn_beta_slow"),
        }
        return {"rope_type": "yarn", "factor": factor} | {k: v for k, v in optional.items() if v is not None}
    if kind == "longrope":
        return {"rope_type": "longrope"}
    raise ConfigError(f"{header.path} has rope.scaling.type {kind!r}; known: none, linear, yarn, longrope.")


def llama3_factors(
    base: float, rotary_dim: int, factor: float, original: int, low: float, high: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What llama3 scaling divides each of the ``rotary_dim / 2`` frequencies by (Llama 3.1's reference code): 1 for
    wavelengths below ``original / high``, ``factor`` above ``original / low``, a blend in between."""
    wavelength = 2 * math.pi * base ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _llama3(
    header: Header, parameters: Mapping[str, Any], factors: np.ndarray, rotary_dim: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    if np.all(factors == 1):
        return {}
    original, low, high = LLAMA3_DEFAULTS
    original = facts.get("rope.scaling.original_context_length", original)
    factor = float(factors.max())
    expected = llama3_factors(parameters["rope_theta"], rotary_dim, factor, original, low, high)
    matches = expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-4)
    if parameters["rope_type"] != "default" or not matches:
        raise ConfigError(
            f"{header.path} scales its rotary frequencies by factors (rope_freqs.weight) that are not llama3's with "
            f"original length {original}, low {low:g}, high {high:g}: not supported."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(
    header: Header, parameters: Mapping[str, Any], factors: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    long, short = factors["factors_long"], factors["factors_short"]
    original = facts.get("rope.scaling.original_context_length")
    if long is None or short is None or original is None or parameters["rope_type"] not in ("default", "longrope"):
        raise ConfigError(
            f"{header.path} has longrope factors, but not all of rope_factors_long.weight, rope_factors_short.weight "
            "and rope.scaling.original_context_length."
        )
    found = {
        "rope_type": "longrope",
        "long_factor": [float(value) for value in long],
        "short_factor": [float(value) for value in short],
        "original_max_position_embeddings": original,
    }
    if "rope.scaling.attn_factor" in facts:
        found["attention_factor"] = facts["rope.scaling.attn_factor"]
    return found


def _floats(headers: Sequence[Header], name: str) -> np.ndarray | None:
    """A small float32 tensor of the model, None if there is none of this name."""
    for header in headers:
        tensor = header.by_name.get(name)
        if tensor is None:
            continue
        if tensor.dtype != "float32" or tensor.is_quantized:
            raise ConfigError(f"{header.path} stores {name} as {tensor.type.name}, expected F32.")
        return np.fromfile(header.path, dtype="<f4", count=math.prod(tensor.shape), offset=tensor.offset)
    return None
