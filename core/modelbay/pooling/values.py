"""Values of configs that are checked alike wherever they stand; null is the same as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelbay.errors import ConfigError


def boolean(config: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    """Raises:
    ConfigError: it is neither true nor false.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{where} has {key} {value!r}, which is neither true nor false.")
    return value


def positive(config: Mapping[str, Any], key: str, what: str, where: str) -> int | None:
    """A whole number from 1 on; None if it is absent.

    Args:
        what: it should be: "size", "number of tokens".

    Raises:
        ConfigError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where} has {key} {value!r}, which is no {what}.")
    return value
