"""A config class that needs neither torch nor Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

#: Keys whose explicit null is a value of its own in Transformers' configs: no window; as many KV heads as heads.
NULL_IS_A_VALUE = frozenset({"sliding_window", "num_key_value_heads"})


class PlainConfig:
    """Class attributes are the defaults, keyword arguments win, None means absent.

    Families derive from it: ``class LlamaConfig(PlainConfig): model_type = "llama"; vocab_size = 32000; …``.
    The one exception to "None means absent" is `NULL_IS_A_VALUE`.
    """

    model_type: str = ""
    #: Further names of a fact in this family's checkpoints: ``{"num_key_value_heads": ("n_head_kv",)}``.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if value is not None or name in NULL_IS_A_VALUE or not hasattr(type(self), name):
                setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"
