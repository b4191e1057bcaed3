"""Transforms applied to names and shapes, before any data is read: the tensors on disk become `Piece`s."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from modelbay.errors import PluginError, WeightsError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.index import shorten
from modelbay.weights.pieces import Narrow, Permute, Piece, Shape, Slot, View
from modelbay.weights.transforms import Ignore, Rename, Reshape, Split, Stack, Transform, Transpose

if TYPE_CHECKING:
    from modelbay.config import ModelConfig


def make_pieces(
    entries: Mapping[str, TensorEntry], transforms: Sequence[Transform], config: ModelConfig
) -> list[Piece]:
    """Every tensor on disk under the model's names, each transform applied to all of them in turn.

    Raises:
        PluginError: a transform is not well-formed (bad pattern, unknown fact).
        WeightsError: a transform matches a tensor that it does not fit.
    """
    pieces = [Piece(source=name, name=name, shape=entry.shape) for name, entry in entries.items()]
    for transform in transforms:
        pattern = _compiled(transform)
        if isinstance(transform, Stack):
            pieces = _stack(transform, pattern, pieces)
            continue
        pieces = [
            result
            for piece in pieces
            for result in (
                _apply(transform, pattern, piece, config)
                if piece.rule is None and pattern.search(piece.name)
                else (piece,)
            )
        ]
    return pieces


def fact(config: ModelConfig, value: int | str) -> int:
    """A size: a number itself, or the name of a fact of the config.

    ``q_size`` and ``kv_size`` are heads × head size; other names are fields of `ModelConfig`, then keys of its text
    config.

    Raises:
        PluginError: the config has no such number.
    """
    if isinstance(value, int):
        return value
    if value == "q_size":
        return config.num_heads * config.head_size
    if value == "kv_size":
        return config.num_kv_heads * config.head_size
    found = getattr(config, value, None)
    if found is None:
        found = config.get(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise PluginError(f"a weight transform asks for the size {value!r}; the config says {found!r}.")
    return found


def _compiled(transform: Transform) -> re.Pattern[str]:
    try:
        pattern = re.compile(transform.pattern)
    except re.error as error:
        raise PluginError(f"the pattern of {transform!r} is not a regular expression: {error}.") from error
    if isinstance(transform, Stack) and "index" not in pattern.groupindex:
        raise PluginError(f"the pattern of {transform!r} needs a group (?P<index>…) that captures the order.")
    return pattern


def _apply(transform: Transform, pattern: re.Pattern[str], piece: Piece, config: ModelConfig) -> Iterable[Piece]:
    match transform:
        case Ignore(rule=rule):
            return (replace(piece, rule=rule),)
        case Rename(replacement=replacement):
            return (replace(piece, name=pattern.sub(replacement, piece.name)),)
        case Transpose(dims=dims):
            return (_transpose(piece, dims),)
        case Reshape():
            return (_reshape(transform, piece, config),)
        case Split():
            return _split(transform, pattern, piece, config)
    raise AssertionError(f"unknown transform {transform!r}")


def _transpose(piece: Piece, dims: tuple[int, int]) -> Piece:
    rank = len(piece.full_shape)
    first, second = (_dim(piece, dim, "transpose") for dim in dims)
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    slot = piece.slot
    if slot is not None:
        # The dimension that stacking adds moves too; the rest of the order is what the single tensor sees.
        moved = order.index(slot.dim)
        inner = [dim - (dim > slot.dim) for dim in order if dim != slot.dim]
        piece, order = replace(piece, slot=replace(slot, dim=moved)), inner
    return piece.then(Permute(tuple(order)))


def _reshape(transform: Reshape, piece: Piece, config: ModelConfig) -> Piece:
    if piece.slot is not None:
        raise PluginError(f"{transform!r} comes after a Stack; put it before.")
    size = _view_size(transform, piece, config)
    if sorted(transform.order) != list(range(len(size))):
        raise PluginError(f"the order of {transform!r} is not an order of {len(size)} dimensions.")
    return piece.then(View(size), Permute(transform.order), View(piece.shape))


def _view_size(transform: Reshape, piece: Piece, config: ModelConfig) -> Shape:
    size = [fact(config, entry) for entry in transform.shape]
    total = prod(piece.shape)
    if size.count(-1) == 1:
        known = prod(entry for entry in size if entry != -1)
        if known and total % known == 0:
            size[size.index(-1)] = total // known
    if prod(size) != total or min(size, default=1) < 0:
        raise WeightsError(f"tensor {piece.source!r} of shape {list(piece.shape)} cannot be viewed as {size}.")
    return tuple(size)


def _split(transform: Split, pattern: re.Pattern[str], piece: Piece, config: ModelConfig) -> list[Piece]:
    if len(transform.names) != len(transform.sizes):
        raise PluginError(f"{transform!r} has {len(transform.names)} names and {len(transform.sizes)} sizes.")
    dim = _dim(piece, transform.dim, "split")
    sizes = [fact(config, size) for size in transform.sizes]
    have = piece.full_shape[dim]
    if sum(sizes) != have or min(sizes) < 0:
        raise WeightsError(f"tensor {piece.source!r} has {have} entries along dimension {dim}, not {sizes}.")
    results, start = [], 0
    for name, size in zip(transform.names, sizes, strict=True):
        named = replace(piece, name=pattern.sub(name, piece.name))
        results.extend(_cut(named, Narrow(dim, start, size)))
        start += size
    return results


def _cut(piece: Piece, cut: Narrow) -> list[Piece]:
    """One of the parts of a split: along the stacked dimension it is a choice of slots, else a narrower view."""
    slot = piece.slot
    if slot is None:
        return [piece.then(cut)]
    if cut.dim != slot.dim:
        return [piece.then(replace(cut, dim=cut.dim - (cut.dim > slot.dim)))]
    if not cut.start <= slot.index < cut.start + cut.size:
        return []
    return [replace(piece, slot=Slot(slot.dim, slot.index - cut.start, cut.size))]


def _dim(piece: Piece, dim: int, what: str) -> int:
    rank = len(piece.full_shape)
    if not -rank <= dim < rank:
        raise WeightsError(f"cannot {what} dimension {dim} of {piece.source!r}: its shape is {list(piece.full_shape)}.")
    return dim % rank


def _stack(transform: Stack, pattern: re.Pattern[str], pieces: list[Piece]) -> list[Piece]:
    results: list[Piece] = []
    groups: dict[str, list[tuple[int, Piece]]] = {}
    for piece in pieces:
        match = pattern.search(piece.name) if piece.rule is None else None
        if match is None:
            results.append(piece)
            continue
        if piece.slot is not None:
            raise PluginError(f"{transform!r} stacks {piece.name!r}, which is already a stack.")
        groups.setdefault(pattern.sub(transform.replacement, piece.name), []).append((int(match["index"]), piece))
    for name, members in groups.items():
        results.extend(_slots(transform, name, members))
    return results


def _slots(transform: Stack, name: str, members: list[tuple[int, Piece]]) -> list[Piece]:
    """The members of one stack: numbered 0 … n-1 without gap, of one shape."""
    indices = sorted(index for index, _ in members)
    if indices != list(range(len(members))):
        raise WeightsError(
            f"{name!r} is stacked from numbers {shorten(map(str, indices))}: not 0 to {len(members) - 1}."
        )
    shapes = {piece.shape for _, piece in members}
    if len(shapes) > 1:
        raise WeightsError(
            f"{name!r} is stacked from tensors of different shapes: {shorten(map(str, sorted(shapes)))}."
        )
    rank = len(members[0][1].shape) + 1
    if not -rank <= transform.dim < rank:
        raise WeightsError(f"{name!r} cannot be stacked along dimension {transform.dim} of {rank}.")
    dim = transform.dim % rank
    return [replace(piece, name=name, slot=Slot(dim, index, len(members))) for index, piece in members]
