"""``hf_overrides``: nested values replaced in the config before its class is chosen (C1)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from modelbay.errors import UsageError
from modelbay.rope import PARTIAL_KEYS, ROPE_DICTS, ROPE_KEYS, THETA_KEYS, merge_rope_override

#: What any config may carry, whether this one does or not.
# fmt: off
COMMON_KEYS = frozenset((
    "architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config",
    "tie_word_embeddings", "is_encoder_decoder", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "initializer_range", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "rope_parameters",
    "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "num_labels", "id2label", "label2id", "problem_type", "use_cache",
))
# fmt: on


def merge(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with the overrides in place; objects merge, everything else is replaced. Neither is changed."""
    merged = dict(raw)
    for key, value in overrides.items():
        if key in (*ROPE_DICTS, *THETA_KEYS, *PARTIAL_KEYS):
            merge_rope_override(merged, key, value)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def check_keys(raw: Mapping[str, Any], overrides: Mapping[str, Any], hf: Any, text_path: tuple[str, ...]) -> None:
    """Refuse override keys that neither the config, nor its class, nor any config knows.

    Args:
        raw: the config before the overrides.
        hf: the config object made from it afterwards, whose attributes are known names too.
        text_path: where the text config is, to say so when a key belongs there.
    """
    _check(raw, overrides, hf, where="", text_path=text_path)


def _check(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], hf: Any, *, where: str, text_path: tuple[str, ...] = ()
) -> None:
    class_keys = _class_keys(hf)
    for key, value in overrides.items():
        name = f"{where}{key}"
        if key not in raw and key not in class_keys and (key not in COMMON_KEYS or _belongs_to_text(key, text_path)):
            raise _unknown(name, key, {*raw, *class_keys, *COMMON_KEYS}, text_path)
        if not isinstance(value, Mapping):
            continue
        inner = raw.get(key)
        inner = inner if isinstance(inner, Mapping) else {}
        if key in ROPE_DICTS:
            _check_rope(inner, value, name)
        elif _is_sub_config(key, inner, hf):
            _check(inner, value, getattr(hf, key, None), where=f"{name}.")


def _check_rope(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> None:
    for key, value in overrides.items():
        if isinstance(value, Mapping):  # one layer type's own parameters
            _check_rope(raw.get(key) or {}, value, f"{where}.{key}")
        elif value is not None and key not in raw and key not in ROPE_KEYS:
            raise _unknown(f"{where}.{key}", key, {*raw, *ROPE_KEYS})


def _is_sub_config(key: str, inner: Mapping[str, Any], hf: Any) -> bool:
    """A sub-config has named fields; other objects (id2label, quantization_config) may hold anything."""
    if key in ("quantization_config", "auto_map"):
        return False
    value = getattr(hf, key, None)
    return hasattr(value, "__dict__") or "model_type" in inner or (key.endswith("_config") and bool(inner))


def _class_keys(hf: Any) -> set[str]:
    """What the class itself names. Attributes of the object do not count: it takes any key it is given."""
    cls = type(hf)
    names: set[str] = set(getattr(cls, "__dataclass_fields__", ())) | set(getattr(cls, "attribute_map", ()))
    for base in cls.__mro__:
        annotations = vars(base).get("__annotations__", {})
        names |= {name for name in (*vars(base), *annotations) if not name.startswith("_")}
    return names


def _belongs_to_text(key: str, text_path: tuple[str, ...]) -> bool:
    """Whether a common key, put beside a nested text config that it is meant for, would have no effect."""
    top_level = ("architectures", "model_type", "dtype", "torch_dtype", "auto_map", "quantization_config")
    return bool(text_path) and key not in top_level and key in COMMON_KEYS


def _unknown(name: str, key: str, known: Iterable[str], text_path: tuple[str, ...] = ()) -> UsageError:
    if _belongs_to_text(key, text_path):
        nested = f'"{key}": …'
        for part in reversed(text_path):
            nested = f'"{part}": {{{nested}}}'
        return UsageError(
            f"hf_overrides: {name!r} has no effect here, the text config is nested.", hint=f"Use {{{nested}}}."
        )
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else "Neither the config nor its class knows it."
    return UsageError(f"hf_overrides: unknown config key {name!r}.", hint=hint)
