"""A piece: what one tensor on disk (or a part of it) becomes in the model, as a short list of views.

No torch: shapes are worked out on tuples, and a step's ``apply`` calls methods that tensors have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Narrow:
    """``size`` entries from ``start`` along ``dim``."""

    dim: int
    start: int
    size: int

    def shape(self, shape: Shape) -> Shape:
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def apply(self, tensor: Any) -> Any:
        return tensor.narrow(self.dim, self.start, self.size)


@dataclass(frozen=True, slots=True)
class Permute:
    """Dimensions in a new order, as ``tensor.permute``."""

    order: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        return tuple(shape[dim] for dim in self.order)

    def apply(self, tensor: Any) -> Any:
        return tensor.permute(self.order)


@dataclass(frozen=True, slots=True)
class View:
    """The same elements under another shape; copies only if they are not in that order in memory."""

    size: Shape

    def shape(self, shape: Shape) -> Shape:
        assert prod(shape) == prod(self.size), f"view of {shape} as {self.size}"
        return self.size

    def apply(self, tensor: Any) -> Any:
        return tensor.reshape(self.size)


@dataclass(frozen=True, slots=True)
class Scale:
    """Each block of ``block`` rows and columns times its entry of the tensor ``source`` on disk; float32 from here on.

    The first step of a piece, if it is one: it is for the tensor as a whole.
    """

    source: str
    block: tuple[int, int]

    def shape(self, shape: Shape) -> Shape:
        return shape

    def apply(self, tensor: Any, scales: Any) -> Any:
        rows, columns = self.block
        values = tensor.float()
        wide = scales.float().repeat_interleave(columns, 1)[:, : values.shape[1]]
        for row in range(wide.shape[0]):
            values[row * rows : (row + 1) * rows] *= wide[row]
        return values


Step = Narrow | Permute | View | Scale


@dataclass(frozen=True, slots=True)
class Slot:
    """The piece is entry ``index`` of ``count`` along a dimension ``dim`` that stacking adds."""

    dim: int
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """The piece is the entries from ``start`` of ``total`` along its dimension ``dim``."""

    dim: int
    start: int
    total: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the tensor ``source`` on disk, under the name ``name``.

    Args:
        shape: after ``steps``, without the slot's dimension.
        slot: set if this piece is one of several that are stacked into ``name``.
        span: set if it is one of several that follow each other in ``name`` (within its slot, if there is one).
        rule: the name of the rule by which it is ignored, if it is.
    """

    source: str
    name: str
    shape: Shape
    steps: tuple[Step, ...] = ()
    slot: Slot | None = None
    span: Span | None = None
    rule: str | None = None

    @property
    def full_shape(self) -> Shape:
        """The shape of the tensor ``name``, of which this piece may be a part."""
        shape = self.shape
        if self.span is not None:
            shape = (*shape[: self.span.dim], self.span.total, *shape[self.span.dim + 1 :])
        if self.slot is not None:
            shape = (*shape[: self.slot.dim], self.slot.count, *shape[self.slot.dim :])
        return shape

    def outer(self, dim: int) -> int:
        """The dimension ``dim`` of ``shape`` as one of ``full_shape``."""
        return dim + (self.slot is not None and dim >= self.slot.dim)

    def inner(self, dim: int) -> int:
        """The dimension ``dim`` of ``full_shape``, which is not the slot's, as one of ``shape``."""
        return dim - (self.slot is not None and dim > self.slot.dim)

    def place_in(self, whole: Any) -> Any:
        """The part of the tensor ``name`` that this piece fills, as a view."""
        if self.span is not None:
            dim = self.outer(self.span.dim)
            whole = whole.narrow(dim, self.span.start, self.shape[self.span.dim])
        return whole if self.slot is None else whole.select(self.slot.dim, self.slot.index)

    def then(self, *steps: Step) -> Piece:
        """This piece with more views behind it."""
        shape = self.shape
        for step in steps:
            shape = step.shape(shape)
        return replace(self, shape=shape, steps=self.steps + steps)

    def index(self) -> tuple[tuple[slice, ...] | None, tuple[Step, ...]]:
        """What to read and what to do afterwards: the leading narrows become an index into the tensor on disk."""
        count = next((i for i, step in enumerate(self.steps) if not isinstance(step, Narrow)), len(self.steps))
        ranges: dict[int, tuple[int, int]] = {}
        for step in self.steps[:count]:
            assert isinstance(step, Narrow)
            start = ranges.get(step.dim, (0, 0))[0] + step.start
            ranges[step.dim] = (start, start + step.size)
        if not ranges:
            return None, self.steps
        dims = range(max(ranges) + 1)
        return tuple(slice(*ranges[dim]) if dim in ranges else slice(None) for dim in dims), self.steps[count:]

    @property
    def scale(self) -> Scale | None:
        """The step that needs a second tensor from disk, if there is one."""
        first = self.steps[0] if self.steps else None
        return first if isinstance(first, Scale) else None

    def without_scale(self) -> Piece:
        """The same of a tensor that is scaled already."""
        return replace(self, steps=self.steps[1:]) if self.scale is not None else self

    @property
    def sources(self) -> tuple[str, ...]:
        """Every tensor on disk that it is made of."""
        return (self.source,) if self.scale is None else (self.source, self.scale.source)
