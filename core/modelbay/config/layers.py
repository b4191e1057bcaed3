"""Which layers attend to everything and which to a window (C9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelbay.config.facts import FactReader
from modelbay.errors import ConfigError
from modelbay.rope import LAYER_KINDS

if TYPE_CHECKING:
    from modelbay.trace import Trace


def layer_types(reader: FactReader, num_layers: int, trace: Trace) -> tuple[tuple[str, ...], int | None]:
    """``(layer types, sliding window)``. The window is None where no layer has one."""
    window = _window(reader)
    found = reader.find("layer_types")
    if found and found[0]:
        if not isinstance(found[0], list | tuple) or not all(isinstance(kind, str) for kind in found[0]):
            raise ConfigError(f"the config's layer_types must be a list of names, got {found[0]!r}.")
        kinds = _declared(list(found[0]), num_layers, found[1], reader, trace)
    else:
        kinds = _derived(reader, num_layers, window)
    if "sliding" in kinds and window is None:
        raise ConfigError("the config's layer_types has sliding layers, but there is no sliding_window.")
    windowed = any("sliding" in kind for kind in kinds)
    if not windowed and window is not None:
        reader.note("sliding_window", None, "derived: no layer has a window")
    return kinds, window if windowed else None


def _window(reader: FactReader) -> int | None:
    """The window in tokens. ``use_sliding_window: false`` and an explicit null mean none."""
    used = reader.find("use_sliding_window")
    if used is not None and used[0] is not None and not used[0]:
        return reader.note("sliding_window", None, f"use_sliding_window is false: {used[1]}")
    value = reader.optional_int("sliding_window", "sliding_window")
    reader.sources.setdefault("sliding_window", "derived: the config has none")
    return value or None


def _declared(kinds: list[str], num_layers: int, source: str, reader: FactReader, trace: Trace) -> tuple[str, ...]:
    if len(kinds) < num_layers:
        raise ConfigError(f"the config's layer_types has {len(kinds)} entries for {num_layers} layers.")
    if len(kinds) > num_layers:
        trace.warn(
            "config",
            "surplus layer_types",
            f"{len(kinds) - num_layers} trimmed",
            "entries past num_hidden_layers belong to next-token-prediction layers, which are not run",
        )
    return reader.note("layer_types", tuple(LAYER_KINDS.get(kind, kind) for kind in kinds[:num_layers]), source)


def _derived(reader: FactReader, num_layers: int, window: int | None) -> tuple[str, ...]:
    if window is None:
        return reader.note("layer_types", ("full",) * num_layers, "derived: no window, every layer is full")
    first = reader.find("max_window_layers")
    if first is None or first[0] is None:
        return reader.note("layer_types", ("sliding",) * num_layers, "derived: a window and no layer_types")
    if isinstance(first[0], bool) or not isinstance(first[0], int):
        raise ConfigError(f"the config's max_window_layers must be a whole number, got {first[0]!r}.")
    kinds = tuple("sliding" if layer >= first[0] else "full" for layer in range(num_layers))
    return reader.note("layer_types", kinds, f"derived: sliding from max_window_layers {first[0]} on")
