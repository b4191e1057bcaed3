"""Readings of core's records that only tests need."""

from __future__ import annotations

from typing import Any

from modelbay.config.plain import PlainConfig
from modelbay.weights.pieces import Piece, Scale


def class_defaults(cls: type) -> dict[str, Any]:
    """The defaults that a `PlainConfig` subclass states, its bases' included."""
    defaults: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base not in (object, PlainConfig):
            defaults |= {name: value for name, value in vars(base).items() if _is_default(name, value)}
    return defaults


def _is_default(name: str, value: Any) -> bool:
    special = name.startswith("_") or name in ("model_type", "aliases")
    return not special and not callable(value) and not isinstance(value, property | classmethod | staticmethod)


def apply_piece(piece: Piece, tensor: Any) -> Any:
    """All views of a piece that is not scaled, on the whole tensor from disk: what reading by index must give."""
    for step in piece.steps:
        assert not isinstance(step, Scale), "scales are read with the tensor: see `Piece.scale`"
        tensor = step.apply(tensor)
    return tensor
