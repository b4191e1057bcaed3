"""Linears that are given the very same tensor become one product, where a layer as a whole could not be replaced.

The probe saw which siblings share their input. Each of them then stands for a section of the packed product: whoever
is called first computes all, the others take their part. That is checked at every call: a sibling that is given another
tensor computes the product for that one. What could not be seen on meta (a view that needs dense memory) is found by
probing once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import PackedLinear
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers.probe import run_as_served
from modelbay_transformers.tensor_parallel import TensorPlan, heads_of_group


class Packed(PackedLinear):
    """The product of several siblings, remembered until every one of them has taken its part."""

    def __init__(
        self,
        build: BuildContext,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        heads: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(build, in_features, parts, bias=bias, heads=heads)
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
    build: BuildContext, base: nn.Module, linears: Mapping[str, Sequence[Hashable]], plan: TensorPlan | None = None
) -> list[tuple[str, ...]]:
    """Pack siblings of ``linears`` (name -> the identity of each call's input) and return the groups.

    Packing that the model's code does not stand (it reads a weight, or needs dense memory) is taken back.

    Args:
        plan: how the model is divided; siblings that it treats differently are left alone.
    """
    groups = _groups(base, linears, build.dtype)
    whole = dataclasses.replace(build, parallel=ParallelContext())
    undo = [(_parent(base, group[0]), _pack(whole, base, group)) for group in groups]
    stands = True
    try:
        run_as_served(base)
    except BackendError:
        stands = False
    if stands and plan is None:
        return groups
    for parent, modules in reversed(undo):
        parent._modules.clear()
        parent._modules.update(modules)
    packed = []
    for group in groups if stands and plan is not None else ():
        heads = heads_of_group(plan, group)
        if heads is not None or not any(name in plan.division.styles for name in group):  # type: ignore[union-attr]
            _pack(whole if heads is None else build, base, group, heads)
            packed.append(group)
    return packed


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


def _pack(
    build: BuildContext, base: nn.Module, group: tuple[str, ...], heads: Mapping[str, int] | None = None
) -> dict[str, nn.Module | None]:
    """Replace the group's linears in their parent; returns the parent's modules as they were. ``heads``: see
    `PackedLinear`."""
    parent = _parent(base, group[0])
    before = dict(parent._modules)
    linears = {name.rpartition(".")[2]: base.get_submodule(name) for name in group}
    sizes = {child: int(linear.out_features) for child, linear in linears.items()}  # type: ignore[arg-type]
    first = next(iter(linears.values()))
    assert isinstance(first, nn.Linear), "only plain linears are grouped"
    packed = Packed(build, first.in_features, sizes, bias=first.bias is not None, heads=heads)
    for section in packed.packed:
        parent._modules[section.name] = Part(packed, section.start, section.size)
    parent.add_module("packed_" + "_".join(linears), packed)
    return before
