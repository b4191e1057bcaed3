"""Who says each value of a RoPE: the JSON under one of its spellings, an argument, the class, or nobody (C5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modelbay.config.facts import FactReader, class_source
from modelbay.rope import LAYER_KINDS, PARTIAL_KEYS, ROPE_DICTS, THETA_KEYS, RopeSpec, is_per_layer_type

_ORIGINAL = "original_max_position_embeddings"


def rope_source(
    reader: FactReader, parameters: Mapping[str, Any], specs: Mapping[str, RopeSpec], length_source: str
) -> str:
    """The sources of all values of ``specs`` in one line; one alone where it says everything.

    Args:
        parameters: the rope object that they were made of.
        length_source: of the model's positions, which stand in for an original length that nobody says.
    """
    names = {LAYER_KINDS.get(kind, kind): kind for kind in parameters} if is_per_layer_type(parameters) else {}
    grouped: dict[str, list[str]] = {}
    for kind, spec in specs.items():
        inside = (names[kind],) if kind in names else ()
        values = parameters.get(names[kind]) or {} if inside else parameters
        for name, source in _sources(reader, values, inside, spec, length_source):
            grouped.setdefault(source, []).append(f"{kind}.{name}" if inside else name)
    if len(grouped) == 1:
        return next(iter(grouped))
    return "; ".join(f"{', '.join(values)}: {source}" for source, values in grouped.items())


def _sources(
    reader: FactReader, values: Mapping[str, Any], inside: tuple[str, ...], spec: RopeSpec, length_source: str
) -> Iterator[tuple[str, str]]:
    yield "type", _source(reader, values, inside, "rope_type", ())
    yield "theta", _source(reader, values, inside, "rope_theta", THETA_KEYS)
    partial = _source(reader, values, inside, "partial_rotary_factor", PARTIAL_KEYS)
    if partial == _NOBODY:
        partial = _source(reader, {}, inside, "rotary_dim", ("rotary_dim",))
    yield "rotary_dim", "derived: the whole head" if partial == _NOBODY else partial
    for key in spec.parameters:
        beside = (_ORIGINAL,) if key == _ORIGINAL else ()
        source = _source(reader, values, inside, key, beside, beside_first=bool(beside))
        yield key, f"derived: {length_source}" if source == _NOBODY and key == _ORIGINAL else source


_NOBODY = "derived: what it is where nobody says it"


def _source(
    reader: FactReader,
    values: Mapping[str, Any],
    inside: tuple[str, ...],
    key: str,
    beside: tuple[str, ...],
    *,
    beside_first: bool = False,
) -> str:
    """Of one value: as the rope object has it, else as what stands beside it has it.

    Args:
        inside: the layer type whose own object it is in, if there is one for each.
        beside: keys that say the same beside the rope object.
        beside_first: whether they win over the object.
    """
    raw, obj = reader.text.raw, reader.text.obj
    said_beside = next((name for name in beside if raw.get(name) is not None), None)
    if beside_first and said_beside is not None:
        return reader.json_source(said_beside)
    if values.get(key) is not None:
        return _of_object(reader, (*inside, key), values[key], beside)
    if said_beside is not None:
        return reader.json_source(said_beside)
    name = next((name for name in beside if getattr(obj, name, None) is not None), None)
    return _NOBODY if name is None else class_source(obj, name, getattr(obj, name))


def _of_object(reader: FactReader, path: tuple[str, ...], value: Any, beside: tuple[str, ...]) -> str:
    """Of a value in the rope object: a class may have put it there from elsewhere."""
    raw, cls = reader.text.raw, type(reader.text.obj)
    for holder in ROPE_DICTS:
        for inner in (path, path[-1:]):  # a class makes one object for each layer type of one for all
            if _at(raw, (holder, *inner)) == value:
                return reader.origins.of((*reader.text.path, holder, *inner))
    for name in beside:
        if raw.get(name) == value:
            return reader.json_source(name)
    if path[-1] in ("rope_type", "rope_theta", "partial_rotary_factor"):
        return "class default"
    length = "max_position_embeddings"
    if path[-1] == _ORIGINAL and raw.get(length) == value:
        return f"derived: by {cls.__name__}, from {reader.json_source(length)}"
    return f"derived: by {cls.__name__}"


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
