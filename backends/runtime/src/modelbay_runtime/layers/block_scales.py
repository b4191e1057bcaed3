"""How a rank's slices of a weight, and the sections of a packed one, lie in the blocks that share a scale.

A slice may begin and end within a block. Then the scales that touch it are loaded, and once loaded repeated for blocks
so fine that the local weight is made of whole ones (but for those at its ends); kernels see a plain grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from modelbay.weights.fp8 import BlockScales
from modelbay_runtime.layout import Section, Shard


@dataclass(frozen=True, slots=True)
class Cut:
    """``size`` entries of the local weight are those from ``start`` of ``total`` on disk, along one dimension; where
    it is made of several, they stand in the order of a sequence of these."""

    start: int
    size: int
    total: int

    @classmethod
    def of(cls, size: int, shard: Shard | None, dim: int) -> Cut:
        if shard is None or shard.dim != dim:
            return cls(0, size, size)
        assert shard.total is not None, "a weight in blocks is cut from one whose size is known"
        assert not shard.pad, "a weight in blocks is not padded"
        return cls(shard.start, shard.size, shard.total)

    def blocks(self, block: int) -> Shard:
        """The blocks that it touches, as a slice of all; along dimension 0."""
        first = self.start // block
        return Shard(0, first, -(-(self.start + self.size) // block) - first, total=-(-self.total // block))


def finest(cuts: Sequence[Cut], block: int) -> int:
    """The largest size of blocks such that no local block has entries of two blocks on disk, or of two sections."""
    local = 0
    size = block
    for cut in cuts:
        size = math.gcd(size, cut.start % block, local)
        local += cut.size
    return size


def scale_of_block(cuts: Sequence[Cut], block: int, fine: int) -> list[int]:
    """For each local block of size ``fine``, the entry among the scales that were loaded, of all cuts in order."""
    found: list[int] = []
    loaded = 0
    for cut in cuts:
        shard = cut.blocks(block)
        places = range(cut.start, cut.start + cut.size, fine)
        found += [loaded + place // block - shard.start for place in places]
        loaded += shard.size
    return found


class ScaledWeight:
    """A weight ``[..., rows, columns]`` in 8 bits: makes the two parameters, and brings the scales to the local grid.

    Args:
        name: the weight's attribute of the module. sections: names of its sections, one for each of ``rows``.
        dim: of the rows; what stands before it (experts) is not in blocks.

    Attributes:
        block: of the local grid.
    """

    def __init__(
        self, module: nn.Module, name: str, blocks: BlockScales, rows: Sequence[Cut], columns: Cut, dim: int = 0
    ) -> None:
        old: torch.Tensor = getattr(module, name)
        self.name, self.scale_name = name, name + blocks.suffix
        self.rows, self.columns, self._disk = tuple(rows), columns, blocks.block
        self.block = (finest(self.rows, blocks.block[0]), finest((columns,), blocks.block[1]))
        height = sum(cut.blocks(blocks.block[0]).size for cut in rows)
        width = columns.blocks(blocks.block[1]).size
        weight = torch.empty(old.shape, dtype=getattr(torch, blocks.dtype), device="meta")
        scales = torch.empty((*old.shape[:dim], height, width), dtype=torch.float32, device="meta")
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        module.register_parameter(self.scale_name, nn.Parameter(scales, requires_grad=False))

    def sections(self, names: Sequence[str], suffix: str, dim: int = 0) -> tuple[Section, ...]:
        """Of the scales: one for each of the rows' cuts."""
        found, start = [], 0
        for name, cut in zip(names, self.rows, strict=True):
            size = cut.blocks(self._disk[0]).size
            found.append(Section(name + suffix, start, size, dim))
            start += size
        return tuple(found)

    def shard(self, cut: Cut, of_weight: Shard | None, dim: int = 0) -> Shard | None:
        """The slice of the scales that belongs to a slice of the weight; ``dim`` is that of the rows."""
        if of_weight is None or of_weight.dim < dim:  # whole, or some experts' whole
            return of_weight
        along_rows = of_weight.dim == dim
        found = (cut if along_rows else self.columns).blocks(self._disk[not along_rows])
        return Shard(of_weight.dim, found.start, found.size, total=found.total)

    def post_load(self, module: nn.Module) -> None:
        """Repeat the scales where a block was cut."""
        scales: torch.Tensor = getattr(module, self.scale_name)
        if self.block == self._disk:
            return
        for dim, cuts in ((0, self.rows), (1, (self.columns,))):
            places = scale_of_block(cuts, self._disk[dim], self.block[dim])
            scales = scales.index_select(dim - 2, torch.tensor(places, device=scales.device))
        module._parameters[self.scale_name] = nn.Parameter(scales, requires_grad=False)
