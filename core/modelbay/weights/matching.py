"""Names on disk against names in the model: each is loaded, tied, or ignored by a rule that has a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from modelbay.errors import WeightsError
from modelbay.weights.index import shorten
from modelbay.weights.pieces import Piece, Shape

#: Tensors that older checkpoints saved though a model computes them: rule -> (pattern, number of dimensions they have;
#: None: any). Only names that no parameter has come here.
KNOWN_CACHES: dict[str, tuple[str, int | None]] = {
    "rotary cache": (r"(^|\.)(rotary_emb|rotary_pos_emb|rope)\.(inv_freq|cos_cached|sin_cached)$", None),
    "causal mask": (r"(^|\.)(attn|attention)\.bias$", 4),  # [1, 1, T, T]: a real bias has one dimension
    "mask value": (r"(^|\.)(attn|attention)\.masked_bias$", 0),
    "position ids": (r"(^|\.)position_ids$", 2),
}
#: Rule names that `match_names` gives by itself.
COMPUTED = "computed by the model"
BEYOND = "layer beyond num_hidden_layers"
NOT_STRICT = "unknown (strict is off)"
#: Rule names for what is not read because this rank has no use for it.
ANOTHER_STAGE = "another stage"
ANOTHER_RANK = "another rank"
ANOTHER_EXPERT = "another rank's expert"

MODEL = "model."
_LAYER = re.compile(r"(?P<container>^(?:.*?\.)?(?:layers|h|blocks))\.(?P<index>\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model wants to be filled.

    Args:
        names: every parameter, section of a packed parameter, and persistent buffer, by logical name.
        fused: a packed parameter's own name -> the names of its sections, which it fills at once.
        tied: a tied parameter's name -> the name of the parameter that it shares.
        computed: buffers that the model computes itself; values on disk are not used.
        num_layers: layers from this number on are not part of the model.
        shapes: of the names, as on disk, where they are known.
        prefixes: what names on disk may begin with though the model's do not, and the other way round.
        optional: those of ``names`` that are filled already: they may be absent on disk.
        elsewhere: names of modules that other ranks hold, and the rule by which their tensors are ignored.
    """

    names: Collection[str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    computed: Collection[str] = ()
    num_layers: int | None = None
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    prefixes: tuple[str, ...] = (MODEL,)
    optional: Collection[str] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Matching:
    """The verdict on every piece. ``piece.name`` is the model's name in `loaded` and `tied`."""

    loaded: list[Piece] = field(default_factory=list)
    tied: list[tuple[Piece, Piece]] = field(default_factory=list)  # the duplicate, the piece that fills the parameter
    ignored: list[tuple[Piece, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def match_names(pieces: Iterable[Piece], expected: Expected, *, strict: bool = True) -> Matching:
    """Decide for every piece and every expected name.

    Raises:
        WeightsError: unknown or missing tensors (unless ``strict`` is off), or two for one name.
    """
    matching = Matching()
    filled: dict[str, list[Piece]] = {}
    duplicates: dict[str, list[Piece]] = {}
    unknown: list[Piece] = []
    known = Known(expected)
    for piece in pieces:
        target = None if piece.rule else known.find(piece.name)
        if piece.rule is not None:
            matching.ignored.append((piece, piece.rule))
        elif target is None:
            rule = known.ignore_rule(piece)
            if rule:
                matching.ignored.append((piece, rule))
            else:
                unknown.append(piece)
        elif target in expected.tied:
            duplicates.setdefault(target, []).append(piece)
        else:
            filled.setdefault(target, []).append(piece if piece.name == target else replace(piece, name=target))
    _settle_ties(matching, filled, duplicates, expected)
    matching.loaded = [piece for group in filled.values() for piece in group]
    covered = _check_unique(filled, expected)
    matching.missing = [name for name in expected.names if name not in covered]
    if not strict:
        matching.ignored.extend((piece, NOT_STRICT) for piece in unknown)
    elif unknown or not set(matching.missing) <= set(expected.optional):
        missing = [name for name in matching.missing if name not in expected.optional]
        raise _does_not_fit(unknown, missing, expected)
    return matching


class Known:
    """Finds a model's name for a name on disk: equal, or with one of the prefixes added, taken away or changed."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._names = {*expected.names, *expected.fused, *expected.tied}
        self._computed = set(expected.computed)
        self._num_layers = expected.num_layers

    @cached_property
    def _containers(self) -> set[str]:
        """The names of the lists of layers."""
        return {match["container"] for match in map(_LAYER.search, self._names) if match}

    def find(self, name: str) -> str | None:
        return next((variant for variant in self._variants(name) if variant in self._names), None)

    def shape(self, name: str) -> Shape | None:
        found = self.find(name)
        return None if found is None else self.expected.shapes.get(self.expected.tied.get(found, found))

    def ignore_rule(self, piece: Piece) -> str | None:
        """The built-in rule by which a name that the model does not have may be passed over."""
        if any(variant in self._computed for variant in self._variants(piece.name)):
            return COMPUTED
        if rule := self.elsewhere(piece.name):
            return rule
        layer = _LAYER.search(piece.name)
        if (
            layer
            and self._num_layers is not None
            and int(layer["index"]) >= self._num_layers
            and any(variant in self._containers for variant in self._variants(layer["container"]))
        ):
            return BEYOND
        for rule, (pattern, rank) in KNOWN_CACHES.items():
            if re.search(pattern, piece.name) and rank in (None, len(piece.shape)):
                return rule
        return None

    def elsewhere(self, name: str) -> str | None:
        """The rule for a name in a module that another rank holds."""
        held = self.expected.elsewhere
        if not held:
            return None
        for variant in self._variants(name):
            while variant:
                if variant in held:
                    return held[variant]
                variant = variant.rpartition(".")[0]
        return None

    def _variants(self, name: str) -> Iterator[str]:
        prefixes = self.expected.prefixes
        yield name
        for prefix in prefixes:
            yield prefix + name
        for removed in prefixes:
            if name.startswith(removed):
                rest = name.removeprefix(removed)
                yield rest
                for prefix in prefixes:
                    yield prefix + rest


def _settle_ties(
    matching: Matching, filled: dict[str, list[Piece]], duplicates: Mapping[str, list[Piece]], expected: Expected
) -> None:
    """A tied name on disk is a duplicate of the parameter it shares, or stands in for it where that one is absent."""
    for name, pieces in duplicates.items():
        canonical = expected.tied[name]
        if canonical in filled:
            matching.tied.extend((replace(piece, name=name), filled[canonical][0]) for piece in pieces)
        else:
            filled[canonical] = [replace(piece, name=canonical) for piece in pieces]


def _check_unique(filled: Mapping[str, list[Piece]], expected: Expected) -> set[str]:
    """The expected names that are covered, each exactly once."""
    covered: dict[str, Piece] = {}
    for name, pieces in filled.items():
        places: dict[tuple[int, int], Piece] = {}
        for piece in pieces:
            place = (piece.slot.index if piece.slot else 0, piece.span.start if piece.span else 0)
            if place in places or piece.full_shape != pieces[0].full_shape:
                _two(name, places.get(place, pieces[0]), piece)
            places[place] = piece
        _check_whole(name, pieces)
        for part in expected.fused.get(name, (name,)):
            if part in covered:
                _two(part, covered[part], pieces[0])
            covered[part] = pieces[0]
    return set(covered)


def _check_whole(name: str, pieces: list[Piece]) -> None:
    have, whole = sum(prod(piece.shape) for piece in pieces), prod(pieces[0].full_shape)
    if have > whole:
        _two(name, pieces[0], pieces[1])
    if have < whole:
        sources = shorten([piece.source for piece in pieces], 3)
        raise WeightsError(f"only a part of {name!r} is on disk: {have} of {whole} values, from {sources}.")


def _two(name: str, first: Piece, second: Piece) -> None:
    raise WeightsError(f"two tensors fill {name!r}: {first.source!r} and {second.source!r}.")


def _does_not_fit(unknown: list[Piece], missing: list[str], expected: Expected) -> WeightsError:
    parts = []
    if unknown:
        names = [
            piece.source if piece.source == piece.name else f"{piece.source} (as {piece.name})" for piece in unknown
        ]
        parts.append(f"{len(unknown)} tensors that the model does not have: {shorten(sorted(names))}")
    if missing:
        parts.append(f"no tensor for {len(missing)} of its parameters: {shorten(sorted(missing))}")
    hint = "The architecture and the checkpoint differ."
    if not unknown and any(name in expected.tied.values() for name in missing):
        hint = "The checkpoint lacks the embedding that the tied output layer shares."
    elif not unknown and all(name.endswith("lm_head.weight") for name in missing):
        hint = "tie_word_embeddings is false, so the output layer needs a tensor of its own."
    return WeightsError(f"the checkpoint does not fit the model: it has {'; it has '.join(parts)}.", hint=hint)
