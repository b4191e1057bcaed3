"""Transforms of several tensors into one: what `Stack` and `Concat` make of the pieces that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from modelbay.errors import PluginError, WeightsError
from modelbay.weights.index import shorten
from modelbay.weights.pieces import Piece, Slot, Span
from modelbay.weights.transforms import Concat, Stack


def stack(transform: Stack, pattern: re.Pattern[str], pieces: Iterable[Piece]) -> list[Piece]:
    results: list[Piece] = []
    groups: dict[str, list[tuple[int, Piece]]] = {}
    for piece in pieces:
        match = pattern.search(piece.name) if piece.rule is None else None
        if match is None:
            results.append(piece)
            continue
        if piece.slot is not None:
            raise PluginError(f"{transform!r} stacks {piece.name!r}, which is already a stack.")
        groups.setdefault(pattern.sub(transform.replacement, piece.name), []).append((_number(match), piece))
    for name, members in groups.items():
        results.extend(_slots(transform, name, members))
    return results


def _slots(transform: Stack, name: str, members: list[tuple[int, Piece]]) -> list[Piece]:
    """The members of one stack: numbered 0 … n-1 without gap, of one shape."""
    _check_numbers(name, "stacked", members)
    shapes = {piece.full_shape for _, piece in members}
    if len(shapes) > 1:
        raise WeightsError(
            f"{name!r} is stacked from tensors of different shapes: {shorten(map(str, sorted(shapes)))}."
        )
    rank, count = len(members[0][1].full_shape) + 1, len({index for index, _ in members})
    if not -rank <= transform.dim < rank:
        raise WeightsError(f"{name!r} cannot be stacked along dimension {transform.dim} of {rank}.")
    dim = transform.dim % rank
    return [replace(piece, name=name, slot=Slot(dim, index, count)) for index, piece in members]


def _check_numbers(name: str, how: str, members: list[tuple[int, Piece]]) -> None:
    """Each number from 0 on is there once; pieces that are themselves joined to one tensor have the same number."""
    indices = sorted({(index, piece.span.start if piece.span else 0) for index, piece in members})
    numbers = sorted({index for index, _ in indices})
    if len(indices) != len(members) or numbers != list(range(len(numbers))):
        found = sorted(index for index, _ in members)
        raise WeightsError(f"{name!r} is {how} from numbers {shorten(map(str, found))}: not 0 to {len(numbers) - 1}.")


def _number(match: re.Match[str]) -> int:
    """The number in a name. What is longer than any count of layers or experts is not one, and slow to read."""
    if len(match["index"]) > 9:
        raise WeightsError(f"{shorten([match.string])!r} has a number of {len(match['index'])} digits in its name.")
    return int(match["index"])


def concat(transform: Concat, patterns: tuple[re.Pattern[str], ...], pieces: Iterable[Piece]) -> list[Piece]:
    results: list[Piece] = []
    groups: dict[str, dict[tuple[int, int], list[Piece]]] = {}
    for piece in pieces:
        found = _member(patterns, piece) if piece.rule is None else None
        if found is None:
            results.append(piece)
            continue
        place, pattern = found
        name = pattern.sub(transform.replacement, piece.name)
        groups.setdefault(name, {}).setdefault(place, []).append(piece)
    for name, members in groups.items():
        results.extend(_spans(transform, name, [members[place] for place in sorted(members)]))
    return results


def _member(patterns: tuple[re.Pattern[str], ...], piece: Piece) -> tuple[tuple[int, int], re.Pattern[str]] | None:
    """The pattern that finds the piece, and its place in the order."""
    for order, pattern in enumerate(patterns):
        match = pattern.search(piece.name)
        if match:
            return (order, _number(match) if "index" in pattern.groupindex else 0), pattern
    return None


def _spans(transform: Concat, name: str, members: list[list[Piece]]) -> list[Piece]:
    """``members``: for each tensor that is joined its pieces: one, or one for each slot of a stack."""
    shapes = [pieces[0].full_shape for pieces in members]
    rank = len(shapes[0])
    if not -rank <= transform.dim < rank:
        raise WeightsError(f"{name!r} cannot be joined along dimension {transform.dim} of {rank}.")
    dim = transform.dim % rank
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(others) > 1 or len({len(shape) for shape in shapes}) > 1:
        raise WeightsError(f"{name!r} is joined from tensors that do not fit: {shorten(map(str, shapes))}.")
    total, start, results = sum(shape[dim] for shape in shapes), 0, []
    for pieces, shape in zip(members, shapes, strict=True):
        results += [_join(transform, name, piece, dim, start, total) for piece in pieces]
        start += shape[dim]
    return results


def _join(transform: Concat, name: str, piece: Piece, dim: int, start: int, total: int) -> Piece:
    slot, inner = piece.slot, piece.inner(dim)
    if slot is not None and slot.dim == dim:
        raise PluginError(f"{transform!r} joins along the dimension that a Stack has added to {piece.name!r}.")
    if piece.span is not None:
        if piece.span.dim != inner:
            raise PluginError(f"{transform!r} joins {piece.name!r}, which is already joined along another dimension.")
        start += piece.span.start
    return replace(piece, name=name, span=Span(inner, start, total))
