"""Transforms applied to names and shapes, before any data is read: the tensors on disk become `Piece`s."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from modelbay.errors import PluginError
from modelbay.weights.formats import TensorEntry
from modelbay.weights.fp8 import dequantise
from modelbay.weights.groups import concat, stack
from modelbay.weights.pieces import Piece, Shape
from modelbay.weights.transforms import (
    Chain,
    Concat,
    Dequantise,
    FirstOf,
    Ignore,
    Rename,
    Reshape,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
)
from modelbay.weights.views import ModelNames, fact, reshape, split, transpose, unstack

if TYPE_CHECKING:
    from modelbay.config import ModelConfig

__all__ = ["adapt_pieces", "fact", "make_pieces"]


def make_pieces(
    entries: Mapping[str, TensorEntry],
    transforms: Sequence[Transform],
    config: ModelConfig,
    model: ModelNames | None = None,
    *,
    kept_scales: Collection[str] = (),
    then: Sequence[Transform] = (),
) -> list[Piece]:
    """Every tensor on disk under the model's names, each transform applied to all of them in turn.

    Args:
        model: for the transforms that depend on what the model has.
        kept_scales: those of the model's names that are scales of others: what they belong to is not dequantised.
        then: what the caller will do with the pieces by `adapt_pieces`.

    Raises:
        PluginError: a transform is not well-formed (bad pattern, unknown fact).
        WeightsError: a transform matches a tensor that it does not fit.
    """
    pieces = [Piece(source=name, name=name, shape=entry.shape) for name, entry in entries.items()]
    others = [transform for transform in transforms if not isinstance(transform, Dequantise)]

    def kept(names: Collection[str]) -> set[str]:
        if model is None or not kept_scales:
            return set()
        wanted = set(names)
        scales = [piece for piece in pieces if piece.source in wanted]
        scales = _Transforms(config, model).run(others, scales)
        scales = adapt_pieces(scales, then, config, model) if then else scales
        return {piece.source for piece in scales if model.find(piece.name) in kept_scales}

    for transform in transforms:
        if isinstance(transform, Dequantise):
            pieces = dequantise(transform, _compiled(transform, transform.pattern), pieces, entries, kept)
    if model is not None:
        # Before the others, which may ask for shapes that this rank does not know.
        pieces = [replace(piece, rule=_elsewhere(piece, model)) if piece.rule is None else piece for piece in pieces]
    return _Transforms(config, model).run(others, pieces)


def _elsewhere(piece: Piece, model: ModelNames) -> str | None:
    """The rule by which another rank has it, if its name on disk says so already."""
    return None if model.find(piece.name) else model.elsewhere(piece.name)


def adapt_pieces(
    pieces: Sequence[Piece], transforms: Sequence[Transform], config: ModelConfig, model: ModelNames
) -> list[Piece]:
    """The same for pieces, with transforms that are written for one of several layouts of a model's checkpoints.

    A tensor whose name the model has, and has no longer after the transforms, is left as it was: it is of the layout
    for which they are not.
    """
    run = _Transforms(config, model).run
    results = run(transforms, pieces)
    arrived = {piece.source for piece in results if piece.rule is None and model.find(piece.name)}
    had = {piece.source for piece in pieces if piece.rule is None and model.find(piece.name)}
    kept = had - arrived
    if not kept:
        return results
    left_alone = [piece for piece in pieces if piece.source in kept]
    return left_alone + run(transforms, [piece for piece in pieces if piece.source not in kept])


class _Transforms:
    """Applies transforms; holds what they may ask for."""

    def __init__(self, config: ModelConfig, model: ModelNames | None) -> None:
        self.config = config
        self.model = model

    def run(self, transforms: Iterable[Transform], pieces: Sequence[Piece]) -> list[Piece]:
        found = list(pieces)
        for transform in transforms:
            found = self._apply(transform, found)
        return found

    def _apply(self, transform: Transform, pieces: list[Piece]) -> list[Piece]:
        match transform:
            case Stack(pattern=pattern):
                return stack(transform, _compiled(transform, pattern), pieces)
            case Concat(patterns=patterns):
                return concat(transform, tuple(_compiled(transform, pattern) for pattern in patterns), pieces)
            case Chain():
                return self._first_of((transform,), pieces)
            case FirstOf(chains=chains):
                return self._first_of(chains, pieces)
        compiled = _compiled(transform, transform.pattern)
        results: list[Piece] = []
        for piece in pieces:
            if piece.rule is None and compiled.search(piece.name):
                results.extend(self._one(transform, compiled, piece))
            else:
                results.append(piece)
        return results

    def _one(self, transform: Transform, pattern: re.Pattern[str], piece: Piece) -> Iterable[Piece]:
        match transform:
            case Ignore(rule=rule):
                known = transform.unless_known and self.model is not None and self.model.find(piece.name)
                return (piece if known else replace(piece, rule=rule),)
            case Rename(replacement=replacement, count=count):
                return (replace(piece, name=pattern.sub(replacement, piece.name, count=count)),)
            case Transpose():
                return (transpose(transform, piece, self.model),)
            case Reshape():
                return (reshape(transform, piece, self.config),)
            case Split():
                return split(transform, pattern, piece, self.config, self.model)
            case Unstack():
                return unstack(transform, pattern, piece)
            case Dequantise():
                raise PluginError(f"{transform!r} is for tensors as they are on disk; it cannot be part of a Chain.")
        raise AssertionError(f"unknown transform {transform!r}")

    def _first_of(self, chains: Sequence[Chain], pieces: list[Piece]) -> list[Piece]:
        """Chains are run on the pieces that they are for, one run for each beginning that ``within`` matches."""
        choose = [(chain, _chooser(chain)) for chain in chains]
        results: list[Piece] = []
        runs: dict[tuple[int, str], list[Piece]] = {}
        for piece in pieces:
            for order, (_, prefix_of) in enumerate(choose):
                prefix = prefix_of(piece.name) if piece.rule is None else None
                if prefix is not None:
                    rest = replace(piece, name=piece.name.removeprefix(prefix))
                    runs.setdefault((order, prefix), []).append(rest)
                    break
            else:
                results.append(piece)
        for (order, prefix), chosen in runs.items():
            model = _Under(prefix, self.model) if prefix and self.model is not None else self.model
            done = _Transforms(self.config, model).run(chains[order].steps, chosen)
            results += [replace(piece, name=prefix + piece.name) for piece in done]
        return results


class _Under:
    """The model's names that begin with a prefix, without it."""

    def __init__(self, prefix: str, model: ModelNames) -> None:
        self._prefix, self._model = prefix, model

    def find(self, name: str) -> str | None:
        return self._model.find(self._prefix + name)

    def shape(self, name: str) -> Shape | None:
        return self._model.shape(self._prefix + name)

    def elsewhere(self, name: str) -> str | None:
        return self._model.elsewhere(self._prefix + name)


def _chooser(chain: Chain) -> Callable[[str], str | None]:
    """For a name: how much of its beginning is ``within``, or None if the chain is not for it."""
    within = _compiled(chain, chain.within)
    patterns = [_compiled(chain, pattern) for pattern in chain.patterns]

    def choose(name: str) -> str | None:
        begin = within.match(name)
        if begin is None:
            return None
        rest = name[begin.end() :]
        return begin.group() if any(pattern.search(rest) for pattern in patterns) else None

    return choose


def _compiled(transform: Transform, pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise PluginError(f"the pattern of {transform!r} is not a regular expression: {error}.") from error
    if isinstance(transform, Stack) and "index" not in compiled.groupindex:
        raise PluginError(f"the pattern of {transform!r} needs a group (?P<index>…) that captures the order.")
    return compiled
