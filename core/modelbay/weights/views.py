"""Transforms of one tensor: what `Transpose`, `Reshape`, `Split` and `Unstack` make of a piece."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Protocol

from modelbay.errors import PluginError, WeightsError
from modelbay.weights.pieces import Narrow, Permute, Piece, Shape, Slot, Span, View
from modelbay.weights.transforms import Reshape, Split, Transpose, Unstack

if TYPE_CHECKING:
    from modelbay.config import ModelConfig


class ModelNames(Protocol):
    """What transforms may ask of the model: `modelbay.weights.matching.Known` answers."""

    def find(self, name: str) -> str | None:
        """The model's name for ``name``, if it has one."""

    def shape(self, name: str) -> Shape | None:
        """The shape of the parameter that ``name`` is, if it is known."""

    def elsewhere(self, name: str) -> str | None:
        """The rule by which a tensor of this name is ignored because another rank holds it."""


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


def transpose(transform: Transpose, piece: Piece, model: ModelNames | None) -> Piece:
    if transform.unless_fits:
        if model is None:
            raise PluginError(f"{transform!r} depends on the model's shapes, which are not known here.")
        if model.shape(piece.name) in (None, piece.full_shape):
            return piece
    rank = len(piece.full_shape)
    first, second = (_dim(piece, dim, "transpose") for dim in transform.dims)
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]
    slot = piece.slot
    if slot is not None:
        # The dimension that stacking adds moves too; the rest of the order is what the single tensor sees.
        moved = order.index(slot.dim)
        inner = [dim - (dim > slot.dim) for dim in order if dim != slot.dim]
        piece, order = replace(piece, slot=replace(slot, dim=moved)), inner
    if piece.span is not None:
        piece = replace(piece, span=replace(piece.span, dim=order.index(piece.span.dim)))
    return piece.then(Permute(tuple(order)))


def reshape(transform: Reshape, piece: Piece, config: ModelConfig) -> Piece:
    if transform.dim is not None:
        return _reshape_dim(transform, piece, config)
    if piece.slot is not None or piece.span is not None:
        raise PluginError(f"{transform!r} comes after a Stack or Concat; put it before.")
    size = _view_size(transform, piece, piece.shape, config)
    return piece.then(View(size), Permute(transform.order), View(piece.shape))


def _reshape_dim(transform: Reshape, piece: Piece, config: ModelConfig) -> Piece:
    assert transform.dim is not None
    dim = _dim(piece, transform.dim, "reshape")
    if piece.slot is not None and piece.slot.dim == dim:
        raise PluginError(f"{transform!r} reshapes the dimension that a Stack has added.")
    dim = piece.inner(dim)
    if piece.span is not None and piece.span.dim == dim:
        raise PluginError(f"{transform!r} reshapes the dimension along which a Concat has joined; put it before.")
    before, after = piece.shape[:dim], piece.shape[dim + 1 :]
    size = _view_size(transform, piece, (piece.shape[dim],), config)
    order = (
        *range(dim),
        *(dim + entry for entry in transform.order),
        *range(dim + len(size), dim + len(size) + len(after)),
    )
    return piece.then(View((*before, *size, *after)), Permute(order), View(piece.shape))


def _view_size(transform: Reshape, piece: Piece, shape: Shape, config: ModelConfig) -> Shape:
    size = [fact(config, entry) for entry in transform.shape]
    total = prod(shape)
    if size.count(-1) == 1:
        known = prod(entry for entry in size if entry != -1)
        if known and total % known == 0:
            size[size.index(-1)] = total // known
    if prod(size) != total or min(size, default=1) < 0:
        raise WeightsError(f"tensor {piece.source!r} of shape {list(piece.shape)} cannot be viewed as {size}.")
    if sorted(transform.order) != list(range(len(size))):
        raise PluginError(f"the order of {transform!r} is not an order of {len(size)} dimensions.")
    return tuple(size)


def split(
    transform: Split, pattern: re.Pattern[str], piece: Piece, config: ModelConfig, model: ModelNames | None
) -> list[Piece]:
    dim = _dim(piece, transform.dim, "split")
    parts = [replace(piece, name=pattern.sub(name, piece.name)) for name in transform.names]
    sizes = _split_sizes(transform, parts, dim, config, model)
    results, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        results.extend(cut_piece(part, Narrow(dim, start, size)))
        start += size
    return results


def _split_sizes(
    transform: Split, parts: list[Piece], dim: int, config: ModelConfig, model: ModelNames | None
) -> list[int]:
    have, source = parts[0].full_shape[dim], parts[0].source
    if transform.sizes == "equal":
        sizes = [have // len(parts)] * len(parts)
    elif transform.sizes == "model":
        if model is None:
            raise PluginError(f"{transform!r} depends on the model's shapes, which are not known here.")
        shapes = [model.shape(part.name) for part in parts]
        unknown = [part.name for part, shape in zip(parts, shapes, strict=True) if shape is None]
        if unknown:
            raise WeightsError(f"tensor {source!r} is to be split into {unknown[0]!r}, which the model does not have.")
        sizes = [shape[dim] for shape in shapes if shape is not None]
    else:
        assert not isinstance(transform.sizes, str)
        if len(transform.names) != len(transform.sizes):
            raise PluginError(f"{transform!r} has {len(transform.names)} names and {len(transform.sizes)} sizes.")
        sizes = [fact(config, size) for size in transform.sizes]
    if sum(sizes) != have or min(sizes) < 0:
        raise WeightsError(f"tensor {source!r} has {have} entries along dimension {dim}, not {sizes}.")
    return sizes


def cut_piece(piece: Piece, cut: Narrow) -> list[Piece]:
    """The piece's share in a part of the tensor it belongs to: a choice of slots, the overlap with a span, or else a
    narrower view; none if it has no share."""
    slot, span = piece.slot, piece.span
    if slot is not None and cut.dim == slot.dim:
        if not cut.start <= slot.index < cut.start + cut.size:
            return []
        return [replace(piece, slot=Slot(slot.dim, slot.index - cut.start, cut.size))]
    dim = piece.inner(cut.dim)
    if span is None or span.dim != dim:
        return [piece.then(replace(cut, dim=dim))]
    first = max(cut.start, span.start)
    last = min(cut.start + cut.size, span.start + piece.shape[dim])
    if first >= last:
        return []
    narrowed = piece.then(Narrow(dim, first - span.start, last - first))
    return [replace(narrowed, span=Span(dim, first - cut.start, cut.size))]


def unstack(transform: Unstack, pattern: re.Pattern[str], piece: Piece) -> list[Piece]:
    dim = _dim(piece, transform.dim, "unstack")
    slot, span = piece.slot, piece.span

    def name(index: int) -> str:
        return pattern.sub(transform.replacement.replace("{index}", str(index)), piece.name)

    if slot is not None and slot.dim == dim:
        return [replace(piece, name=name(slot.index), slot=None)]
    inner = piece.inner(dim)
    if span is not None:
        if span.dim == inner:
            raise PluginError(f"{transform!r} takes apart what a Concat has joined; put it before.")
        span = replace(span, dim=span.dim - (span.dim > inner))
    if slot is not None:
        slot = replace(slot, dim=slot.dim - (slot.dim > dim))
    shape = (*piece.shape[:inner], *piece.shape[inner + 1 :])
    return [
        replace(piece.then(Narrow(inner, index, 1), View(shape)), name=name(index), slot=slot, span=span)
        for index in range(piece.shape[inner])
    ]


def _dim(piece: Piece, dim: int, what: str) -> int:
    rank = len(piece.full_shape)
    if not -rank <= dim < rank:
        raise WeightsError(f"cannot {what} dimension {dim} of {piece.source!r}: its shape is {list(piece.full_shape)}.")
    return dim % rank
