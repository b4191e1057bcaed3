"""How layers that keep different things share one pool of pages.

Every page has the same size. Layers with the same KVSpec form groups of equal length; the i-th layers of all groups
share the i-th tensor, and a page of the pool belongs to one group at a time. So full, sliding, latent and per-sequence
layers take from one pool, and none needs a partition of its own. A group's block holds as many tokens as fit a page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from modelbay_runtime.kv_spec import KVSpec

#: A group with fewer extra layers than this share of the smallest group is padded instead of split.
_PADDING_TOLERANCE = 1.25


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables.

    ``block_size``: tokens in one block; None for a state that one block holds whole, whatever the length.
    ``row_stride``: elements from one token's row to the next (at least ``spec.row``).
    """

    spec: KVSpec
    layers: tuple[int, ...]
    block_size: int | None
    row_stride: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """``page``: elements of one page of one tensor. ``tensors``: how many tensors, one per layer of a group."""

    groups: tuple[KVGroup, ...]
    page: int
    tensors: int

    def tensors_of(self, layers: Collection[int] | None = None) -> list[int]:
        """The tensors that a rank with these layers needs (None: all of them)."""
        if layers is None:
            return list(range(self.tensors))
        return sorted({at for group in self.groups for at, layer in enumerate(group.layers) if layer in layers})

    def page_elements(self, layers: Collection[int] | None = None) -> int:
        """Elements that one block takes over all tensors of a rank with these layers."""
        return self.page * len(self.tensors_of(layers))

    def blocks_for(self, tokens: int, chunk: int) -> int:
        """Most blocks that one sequence of this length holds at a time, over all groups, computed ``chunk`` by chunk.

        A chunk's blocks are all there before the window slides past the first of them.
        """
        total = 0
        for group in self.groups:
            if group.block_size is None:
                total += 1
                continue
            blocks = -(-tokens // group.block_size)
            if group.spec.window is not None:
                blocks = min(blocks, -(-(group.spec.window + chunk) // group.block_size) + 1)
            total += blocks
        return total


def plan_layout(specs: Mapping[int, KVSpec], block_size: int) -> CacheLayout:
    """Group the layers and find the page size.

    Args:
        specs: layer index -> what it keeps; layers that keep nothing are left out of the cache.
        block_size: tokens per block of the widest layer; narrower layers get a multiple.
    """
    layers_of: dict[KVSpec, list[int]] = {}
    for layer, spec in sorted(specs.items()):
        if spec.row or spec.per_sequence:
            layers_of.setdefault(spec, []).append(layer)
    if not layers_of:
        return CacheLayout((), 0, 0)
    widest = max(spec.row for spec in layers_of) * block_size
    state = max(spec.per_sequence for spec in layers_of)
    page = max(widest, -(-state // widest) * widest) if widest else state
    counts = [len(layers) for layers in layers_of.values()]
    per_group = max(counts) if max(counts) < _PADDING_TOLERANCE * min(counts) else min(counts)
    groups = []
    for spec, layers in layers_of.items():
        size, stride = _block_of(spec, page, block_size)
        for begin in range(0, len(layers), per_group):
            groups.append(KVGroup(spec, tuple(layers[begin : begin + per_group]), size, stride))
    return CacheLayout(tuple(groups), page, per_group)


def _block_of(spec: KVSpec, page: int, block_size: int) -> tuple[int | None, int]:
    """(tokens per block, row stride): the largest multiple of ``block_size`` whose rows fill the page evenly."""
    if not spec.row:
        return None, page
    factor = page // (block_size * spec.row)
    while page % (block_size * factor):
        factor -= 1
    return block_size * factor, page // (block_size * factor)
