"""The config's RoPE, gathered from JSON and class into one normal form (C5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelbay.config.facts import FactReader
from modelbay.config.length import positions
from modelbay.config.rope_source import rope_source
from modelbay.errors import ConfigError
from modelbay.rope import (
    PARTIAL_KEYS,
    REQUIRED,
    ROPE_DICTS,
    THETA_KEYS,
    RopeDefaults,
    RopeSpec,
    canonical,
    rope_specs,
)

if TYPE_CHECKING:
    from modelbay.trace import Trace


def rope(reader: FactReader, head_size: int, trace: Trace) -> dict[str, RopeSpec]:
    """RoPE per layer type; empty for a model without RoPE (or whose class hides it from its config)."""
    for key in ROPE_DICTS:
        if (said := reader.text.raw.get(key)) and not isinstance(said, Mapping):
            raise ConfigError(f"the config's {key} must be an object, got {said!r}.")
    parameters = _parameters(reader)
    theta, partial = _first(reader, THETA_KEYS), _first(reader, PARTIAL_KEYS)
    if not parameters and theta is None:
        reader.note("rope", {}, "derived: neither config nor class has RoPE")
        return {}
    length = positions(reader)
    defaults = RopeDefaults(
        theta=theta,
        partial=partial,
        rotary_dim=_whole(_first(reader, ("rotary_dim",))),
        original_length=_whole(_first(reader, ("original_max_position_embeddings",))),
        length=length[0] if length else None,
    )
    specs = rope_specs(parameters, defaults, head_size)
    reader.note("rope", specs, rope_source(reader, parameters, specs, length[1] if length else ""))
    for kind, spec in specs.items():
        if spec.type not in REQUIRED:
            trace.warn("config", f"RoPE type of {kind} layers", spec.type, "not one that Modelbay's own layers know")
    return specs


def _parameters(reader: FactReader) -> Mapping[str, Any]:
    """The rope object: as a Transformers class has completed it, else as the JSON or the class has it."""
    if reader.origin == "transformers":
        completed = getattr(reader.text.obj, "rope_parameters", None)
        if completed:
            return canonical(completed)
    for key in ROPE_DICTS:
        value = reader.text.raw.get(key)
        if isinstance(value, Mapping):
            return value
    for key in ROPE_DICTS:
        value = getattr(reader.text.obj, key, None)
        if isinstance(value, Mapping):
            return canonical(value)
    return {}


def _first(reader: FactReader, keys: tuple[str, ...]) -> Any:
    """The first of these keys that the JSON says, else the first that the class says."""
    for key in keys:
        value = reader.text.raw.get(key)
        if value is not None:
            return value
    for key in keys:
        value = getattr(reader.text.obj, key, None)
        if value is not None:
            return value
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
