"""Linears that are given the very same tensor become one product, where a layer as a whole could not be replaced.

The probe saw which siblings share their input. Each of them then stands for a section of the packed product: whoever
is called first computes all, the others take their part. That is checked at every call: a sibling that is given another
tensor computes the product for that one. What could not be seen on meta (a view that needs dense memory) is found by
probing once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import PackedLinear
from modelbay_transformers.probe import probe


class Packed(PackedLinear):
    """The product of several siblings, remembered until every one of them has taken its part."""

    def __init__(self, build: BuildContext, in_features: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__(build, in_features, parts, bias=bias)
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._left = 0

    def part(self, x: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """Columns ``start`` to ``start + size`` of the product with ``x``."""
        if x is not self._input or self._output is None:
            self._input, self._output, self._left = x, self(x), len(self.packed)
        result = self._output[..., start : start + size]
        self._left -= 1
        if not self._left:
            self._input = self._output = None
        return result


class Part(nn.Module):
    """Stands where a linear was; its parameters are a section of ``packed``."""

    def __init__(self, packed: Packed, start: int, size: int) -> None:
        super().__init__()
        self._packed = (packed,)  # in a tuple: the parameters belong to the packed module alone
        self.start, self.out_features = start, size
        self.in_features = packed.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed[0].part(x, self.start, self.out_features)


def pack_linears(
    build: BuildContext, base: nn.Module, linears: Mapping[str, Sequence[Hashable]]
) -> list[tuple[str, ...]]:
    """Pack siblings of ``linears`` (name -> the identity of each call's input) and return the groups.

    Packing that the model's code does not stand (it reads a weight, or needs dense memory) is taken back.
    """
    groups = _groups(base, linears, build.dtype)
    undo = [(_parent(base, group[0]), _pack(build, base, group)) for group in groups]
    try:
        probe(base)
    except BackendError:
        for parent, modules in undo:
            parent._modules.clear()
            parent._modules.update(modules)
        return []
    return groups


def _groups(base: nn.Module, linears: Mapping[str, Sequence[Hashable]], dtype: torch.dtype) -> list[tuple[str, ...]]:
    by_input: dict[tuple[object, ...], list[str]] = {}
    for name, inputs in linears.items():
        linear = base.get_submodule(name)
        if len(inputs) == 1 and type(linear) is nn.Linear and linear.weight.dtype == dtype:
            key = (name.rpartition(".")[0], inputs[0], linear.in_features, linear.bias is not None)
            by_input.setdefault(key, []).append(name)
    return [tuple(names) for names in by_input.values() if len(names) > 1]


def _parent(base: nn.Module, name: str) -> nn.Module:
    return base.get_submodule(name.rpartition(".")[0])


def _pack(build: BuildContext, base: nn.Module, group: tuple[str, ...]) -> dict[str, nn.Module | None]:
    """Replace the group's linears in their parent; returns the parent's modules as they were."""
    parent = _parent(base, group[0])
    before = dict(parent._modules)
    linears = {name.rpartition(".")[2]: base.get_submodule(name) for name in group}
    sizes = {child: int(linear.out_features) for child, linear in linears.items()}  # type: ignore[arg-type]
    first = next(iter(linears.values()))
    assert isinstance(first, nn.Linear), "only plain linears are grouped"
    packed = Packed(build, first.in_features, sizes, bias=first.bias is not None)
    for section in packed.packed:
        parent._modules[section.name] = Part(packed, section.start, section.size)
    parent.add_module("packed_" + "_".join(linears), packed)
    return before
