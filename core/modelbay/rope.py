"""RoPE's one normal form (BEHAVIOUR C5).

Checkpoints say the same thing in many ways: ``rope_scaling`` with ``type`` or ``rope_type``, ``rope_theta`` beside it
or inside it, ``rotary_pct``. Here they all become ``rope_parameters`` (flat, or one object per layer type) with
``rope_type`` and ``rope_theta``, and then one `RopeSpec` per layer type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelbay.errors import ConfigError

ROPE_DICTS = ("rope_parameters", "rope_scaling")
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
#: Older names of types, and what they are called now.
TYPE_ALIASES = {"su": "longrope", "mrope": "default"}
#: What each known type cannot do without.
REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
#: Keys that a known type divides by or takes the logarithm of, and further ones that are numbers.
_POSITIVE = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
)  # fmt: skip
_NUMBERS = ("attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale")
#: Types that stretch a trained length, and therefore need to know it.
NEEDS_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
#: Types for which ``max_position_embeddings`` is the trained length, before stretching.
LENGTH_IS_ORIGINAL = ("linear", "dynamic")
#: The layer kinds of Transformers, and the short names used here. Other kinds keep their name.
LAYER_KINDS = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}
# fmt: off
ROPE_KEYS = frozenset((
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "short_mscale", "long_mscale", "low_freq_factor", "high_freq_factor", "mrope_section",
    "mrope_interleaved", "alpha",
    *LAYER_KINDS,
))
# fmt: on
#: Those that no layer type is called.
_PARAMETERS = ROPE_KEYS - LAYER_KINDS.keys()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of one kind of layer.

    ``type``: default, linear, dynamic, yarn, longrope, llama3 (Transformers' names). ``theta``: the base.
    ``rotary_dim``: how many of the head's dimensions turn (head_size × partial_rotary_factor).
    ``parameters``: the remaining keys of ``rope_parameters`` (factor, low_freq_factor, mrope_section …).
    """

    type: str
    theta: float
    rotary_dim: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


def is_per_layer_type(parameters: Mapping[str, Any]) -> bool:
    """Whether this is one object (or null: no RoPE) per layer type, rather than RoPE parameters themselves."""
    return bool(parameters) and all(
        value is None or isinstance(value, Mapping) for key, value in parameters.items() if key not in ROPE_KEYS
    ) and any(isinstance(value, Mapping) for key, value in parameters.items() if key not in _PARAMETERS)  # fmt: skip


def canonical(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A rope object with ``rope_type`` instead of ``type`` and today's type names, without nulls.

    It may be one object per layer type.

    Raises:
        ConfigError: ``type`` and ``rope_type`` name two different types.
    """
    if is_per_layer_type(parameters):
        nested = {
            key: value if value is None else canonical(value) for key, value in parameters.items() if _is_nested(value)
        }
        return nested | {key: value for key, value in parameters.items() if not _is_nested(value)}
    values = {key: value for key, value in parameters.items() if value is not None}
    old, new = values.pop("type", None), values.pop("rope_type", None)
    _check_name(old)
    _check_name(new)
    if old and new and TYPE_ALIASES.get(old, old) != TYPE_ALIASES.get(new, new):
        raise ConfigError(
            f"the config's RoPE says type={old!r} and rope_type={new!r}.",
            hint='Choose one with hf_overrides, e.g. {"rope_parameters": {"rope_type": ' + f'"{new}"' + "}}.",
        )
    kind = new or old
    if kind == "mrope" and "mrope_section" not in values:
        raise ConfigError("the config's RoPE is of type 'mrope' but has no mrope_section.")
    if kind:
        values = {"rope_type": TYPE_ALIASES.get(kind, kind)} | values
    return values


def _check_name(kind: Any) -> None:
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"the config's rope_type must be a name, got {kind!r}.")


def _is_nested(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def canonical_config(config: dict[str, Any]) -> list[str]:
    """Bring the RoPE keys of one config dict to canonical spelling, in place. Returns what was changed, in words."""
    done = _canonical_keys(config)
    present = {key: config[key] for key in ROPE_DICTS if isinstance(config.get(key), Mapping)}
    if len(present) == 2:
        config["rope_parameters"] = _same(canonical(present["rope_parameters"]), canonical(present["rope_scaling"]))
        del config["rope_scaling"]
        return [*done, "rope_scaling and rope_parameters made one"]
    for key, value in present.items():
        new = canonical(value)
        if new != value:
            config[key] = new
            done.append(f"{key} in canonical spelling")
    return done


def _canonical_keys(config: dict[str, Any]) -> list[str]:
    """Say under the canonical key too what another one says, which not every class reads."""
    done = []
    for canonical_key, *others in (THETA_KEYS, PARTIAL_KEYS):
        said = next((key for key in others if config.get(key) is not None), None)
        if said is not None and config.get(canonical_key) is None:
            config[canonical_key] = config[said]
            done.append(f"{said} as {canonical_key}")
    return done


def _same(parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings in one config: their union, if they do not contradict each other."""
    for key in parameters.keys() & scaling.keys():
        if parameters[key] != scaling[key]:
            raise ConfigError(
                f"the config's rope_parameters and rope_scaling disagree on {key}: "
                f"{parameters[key]!r} and {scaling[key]!r}.",
                hint='Drop one with hf_overrides, e.g. {"rope_scaling": null}.',
            )
    return {**scaling, **parameters}


def merge_rope_override(config: dict[str, Any], key: str, value: Any) -> None:
    """Put one RoPE override into a config dict, whichever spelling the config and the override use.

    Objects merge (a yarn override keeps the theta), a type replaces a type under either name, and a theta or a
    partial factor given beside the object also replaces the one inside it.
    """
    if key in ROPE_DICTS and isinstance(value, Mapping):
        here = next((name for name in ROPE_DICTS if isinstance(config.get(name), Mapping)), key)
        config[here] = _merge_parameters(config.get(here) or {}, value)
        return
    config[key] = value
    if key in ROPE_DICTS:  # null: no scaling, under either name; a theta inside stays
        for name in ROPE_DICTS:
            kept = _unscaled(config.get(name))
            if name in config:
                config[name] = kept or None
        return
    if value is None:
        return
    canonical_key = "rope_theta" if key in THETA_KEYS else "partial_rotary_factor"
    for name in (*THETA_KEYS, *PARTIAL_KEYS):
        same_fact = (name in THETA_KEYS) == (key in THETA_KEYS)
        if same_fact and name != key and name in config:
            config[name] = value
    for name in ROPE_DICTS:
        if isinstance(config.get(name), Mapping):
            config[name] = _replace_inside(config[name], canonical_key, value)


def _merge_parameters(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    if {"type", "rope_type"} & new.keys():
        merged.pop("type", None)
        merged.pop("rope_type", None)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = _merge_parameters(before, value)
        else:
            merged[key] = value
    return merged


def _replace_inside(parameters: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    if is_per_layer_type(parameters):
        return {
            name: _replace_inside(inner, key, value) if isinstance(inner, Mapping) else inner
            for name, inner in parameters.items()
        }
    return {**parameters, key: value} if key in parameters else dict(parameters)


def _unscaled(parameters: Any) -> dict[str, Any] | None:
    """What is left of a rope object when its scaling is taken away: the base and the share that turns."""
    if not isinstance(parameters, Mapping):
        return None
    if is_per_layer_type(parameters):
        return {key: _unscaled(value) for key, value in parameters.items()}
    kept = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return {"rope_type": "default", **kept} if kept else None


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What stands beside the rope object: used for what the object itself does not say.

    ``theta`` and ``partial``: JSON's top-level values, else the class defaults (None: neither says).
    ``rotary_dim``: an absolute number of turning dimensions, for configs that give no share.
    ``original_length``: ``original_max_position_embeddings`` beside the object; ``length``: the model's positions.
    """

    theta: float | None = None
    partial: float | None = None
    rotary_dim: int | None = None
    original_length: int | None = None
    length: int | None = None


def rope_specs(parameters: Mapping[str, Any], defaults: RopeDefaults, head_size: int) -> dict[str, RopeSpec]:
    """One `RopeSpec` per layer type, or a single one under "default".

    Args:
        parameters: a `canonical` rope object; empty if the config has only a theta.

    Raises:
        ConfigError: a type lacks what it needs, a base is not positive, or more dimensions turn than the head has.
    """
    if not is_per_layer_type(parameters):
        return {"default": _spec(parameters, defaults, head_size)}
    return {
        LAYER_KINDS.get(kind, kind): _spec(value, defaults, head_size)
        for kind, value in parameters.items()
        if isinstance(value, Mapping)  # null: layers of this type have no RoPE
    }


def _spec(parameters: Mapping[str, Any], defaults: RopeDefaults, head_size: int) -> RopeSpec:
    values = {key: value for key, value in parameters.items() if value is not None}
    kind = values.pop("rope_type", "default")
    _check_name(kind)
    missing = [key for key in REQUIRED.get(kind, ()) if key not in values]
    if missing:
        raise ConfigError(f"the config's RoPE of type {kind!r} lacks {', '.join(missing)}.")
    theta = values.pop("rope_theta", None)
    theta = next((value for value in (theta, defaults.theta) if value is not None), 10_000.0)
    if not _is_number(theta) or theta <= 0:
        raise ConfigError(f"the config's rope_theta must be a positive number, got {theta!r}.")
    partial = values.pop("partial_rotary_factor", None)
    if kind in REQUIRED:
        _check_numbers(kind, values)
    if kind in NEEDS_ORIGINAL_LENGTH:
        _set_original_length(values, kind, defaults)
    return RopeSpec(kind, float(theta), _rotary_dim(partial, defaults, head_size), values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_numbers(kind: str, values: Mapping[str, Any]) -> None:
    """What a known type computes with. A zero or a NaN among it would turn every position into another one, quietly."""
    where = f"the config's RoPE of type {kind!r}"
    for key in _POSITIVE:
        value = values.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise ConfigError(f"{where} must have a positive number as {key}, got {value!r}.")
    for key in _NUMBERS:
        value = values.get(key)
        if value is not None and not _is_number(value):
            raise ConfigError(f"{where} must have a number as {key}, got {value!r}.")
    for key in REQUIRED["longrope"]:
        value = values.get(key)
        if value is not None and not (
            isinstance(value, list | tuple) and all(_is_number(item) and item > 0 for item in value)
        ):
            raise ConfigError(f"{where} must have a list of positive numbers as {key}.")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ConfigError(
            f"{where} has low_freq_factor {values['low_freq_factor']}, which is not below "
            f"high_freq_factor {values['high_freq_factor']}."
        )


def _set_original_length(values: dict[str, Any], kind: str, defaults: RopeDefaults) -> None:
    key = "original_max_position_embeddings"
    if defaults.original_length is not None:
        values[key] = defaults.original_length  # Phi-3 and its kin write it beside the object; it wins there
    elif key not in values:
        if defaults.length is None:
            raise ConfigError(f"the config's RoPE of type {kind!r} lacks {key}, and there is no maximum length.")
        values[key] = defaults.length


def _rotary_dim(partial: float | None, defaults: RopeDefaults, head_size: int) -> int:
    if partial is None:
        partial = defaults.partial
    if partial is None:
        dim = defaults.rotary_dim if defaults.rotary_dim is not None else head_size
    elif not _is_number(partial):
        raise ConfigError(f"the config's partial_rotary_factor must be a number, got {partial!r}.")
    else:
        dim = int(head_size * partial)
    if not 0 < dim <= head_size:
        raise ConfigError(f"the config's RoPE turns {dim} of {head_size} head dimensions.")
    return dim
