"""A config class that needs neither torch nor Transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from modelbay.errors import ConfigError

#: Keys whose explicit null is a value of its own in Transformers' configs: no window; as many KV heads as heads.
NULL_IS_A_VALUE = frozenset({"sliding_window", "num_key_value_heads"})


#: Keys that core reads by itself, with more to say about each (a list of one count for each layer, a null, a range).
CORE_READS = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "max_window_layers", "layer_types",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "tie_word_embeddings", "num_experts",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip


class PlainConfig:
    """Class attributes are the defaults, keyword arguments win, None means absent.

    Families derive from it: ``class LlamaConfig(PlainConfig): model_type = "llama"; vocab_size = 32000; …``.
    The one exception to "None means absent" is `NULL_IS_A_VALUE`.

    A value has the type of its default (or of its annotation, where the default is None): true or false, a whole number
    of at least 0, a finite number, or text. The facts that core reads itself are left to it (`CORE_READS`).

    Raises:
        ConfigError: a value of another type, by name.
    """

    model_type: str = ""
    #: Further names of a fact in this family's checkpoints: ``{"num_key_value_heads": ("n_head_kv",)}``.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if value is not None or name in NULL_IS_A_VALUE or not hasattr(type(self), name):
                setattr(self, name, _of_its_type(type(self), name, value))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


def _of_its_type(cls: type, name: str, value: Any) -> Any:
    """The value in the form of its type: a flag that is written as 0 or 1, a count as 4.0."""
    kind = _kind(cls, name)
    if value is None or kind is None or name in CORE_READS:
        return value
    meaning, accepts = _KINDS[kind]
    if not accepts(value):
        raise ConfigError(f"the config's {name} must be {meaning}, got {value!r}.")
    return kind(value)


def _kind(cls: type, name: str) -> type | None:
    """The type of a default, or the one that its annotation has besides None; None for what is not checked."""
    default = getattr(cls, name, None)
    if default is not None:
        return next((kind for kind in _KINDS if type(default) is kind), None)
    said = next((str(_annotations(base)[name]) for base in cls.__mro__ if name in _annotations(base)), "")
    names = {part.strip() for part in said.split("|")} - {"None"}
    return next((kind for kind in _KINDS if names == {kind.__name__}), None)


def _annotations(cls: type) -> Mapping[str, Any]:
    return vars(cls).get("__annotations__", {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and float(value).is_integer()


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, int | float) and value in (0, 1)),
    int: ("a whole number of at least 0", _is_count),
    float: ("a number", _is_number),
    str: ("text", lambda value: isinstance(value, str)),
}
