"""Where in a config the text model is described, at any depth (C4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The keys under which composite configs keep the config of their text model, in the order in which they are tried.
TEXT_KEYS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "text_encoder",
    "decoder",
    "generator",
)
#: A nested dict is a text config if it says at least one of these, or has such a dict inside.
_TELLING = {"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "n_embd", "d_model", "architectures"}


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text model's config object and dict; ``path``: the keys that lead from the whole dict to ``raw``.

    ``raw`` is the innermost dict that the JSON has. If the class alone nests (a flat JSON whose class builds a text
    config of it), ``raw`` is the flat dict, and ``by_class`` is true.
    """

    raw: Mapping[str, Any]
    obj: Any
    path: tuple[str, ...]
    by_class: bool


def text_path(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that lead to the text config in a dict; empty if it is the dict itself."""
    for key in TEXT_KEYS:
        inner = raw.get(key)
        if isinstance(inner, Mapping) and _tells(inner):
            return (key, *text_path(inner))
    return ()


def _tells(inner: Mapping[str, Any]) -> bool:
    return bool(_TELLING & inner.keys()) or bool(text_path(inner))


def inner_dict(raw: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The dict at the end of ``path``."""
    value: Any = raw
    for key in path:
        value = value[key]
    return value


def find_text(raw: Mapping[str, Any], hf: Any) -> TextConfig:
    """Follow the JSON's path through the config object, and the class's own nesting where the JSON is flat.

    A level that the object keeps as a dict (its class does not know it) stays a dict there; the caller wraps it.
    """
    path = text_path(raw)
    obj = hf
    for key in path:
        obj = _step(obj, key)
    by_class = False
    while (attribute := _object_key(obj)) is not None:
        obj, by_class = _step(obj, attribute), True
    return TextConfig(inner_dict(raw, path), obj, path, by_class)


def _step(obj: Any, key: str) -> Any:
    return obj.get(key) if isinstance(obj, Mapping) else getattr(obj, key, None)


def _object_key(obj: Any) -> str | None:
    """The attribute under which a config object holds a text config object, if it does."""
    for key in TEXT_KEYS:
        inner = getattr(obj, key, None)
        if hasattr(inner, "model_type") and not isinstance(inner, type):
            return key
    return None
