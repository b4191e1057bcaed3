"""What stands in for the linears of a model on one rank: by the features that they give, and what share of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelbay_transformers.division import COLWISE, ROWWISE, SPLIT_INPUT, WHOLE, Division
from modelbay_transformers.probe_run import SMALL
from modelbay_transformers.shares import NotShared, Share, mark_share, share_of


class Restyle(Exception):
    """A linear gets its input as a share, or whole, other than its style says."""

    def __init__(self, name: str, style: str) -> None:
        super().__init__(name)
        self.name, self.style = name, style


@contextmanager
def standing_in(
    base: nn.Module, linears: Mapping[str, Any], opaque: Iterable[str], division: Division, latest: list[str]
) -> Iterator[None]:
    """Linears and opaque modules are stood in for; parameters and attributes are those of one rank.

    Args:
        latest: the names of the linears that gave a share, in their order.
    """
    size = division.size
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def put(table: dict[str, Any], key: str, value: Any) -> None:
        kept.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    try:
        for name, linear in linears.items():
            put(linear.__dict__, "forward", _linear(name, linear, division, latest))
        for name in opaque:
            put(base.get_submodule(name).__dict__, "forward", _give_hidden)
        for name, dim in division.parameters.items() if size > 1 else ():
            path, _, key = name.rpartition(".")
            module = base.get_submodule(path)
            put(module._parameters, key, _local(module._parameters[key], dim, size, name))
        for name, values in division.attributes.items() if size > 1 else ():
            for key, value in values.items():
                put(base.get_submodule(name).__dict__, key, value)
        yield
    finally:
        for table, key, value in reversed(kept):
            if value is _ABSENT:
                del table[key]
            else:
                table[key] = value


_ABSENT = object()


def _give_hidden(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states)


def _local(parameter: Any, dim: int, size: int, name: str) -> nn.Parameter:
    shape = list(parameter.shape)
    if shape[dim] % size:
        raise NotShared(f"{name} {tuple(shape)} does not divide over {size}", frozenset((name,)))
    shape[dim] //= size
    local = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    mark_share(local, Share(dim, size, frozenset((name,))))
    return local


def _linear(name: str, linear: Any, division: Division, latest: list[str]) -> Callable[..., torch.Tensor]:
    """The stand-in for one linear on one rank."""
    style = division.styles.get(name, WHOLE) if division.size > 1 else WHOLE
    parts = division.parts.get(name, division.size)
    sections = division.sections.get(name, ())

    def forward(input: torch.Tensor) -> torch.Tensor:
        share, takes_share = share_of(input), style == ROWWISE
        features = share is not None and (share.dim, share.parts) == (input.dim() - 1, division.size)
        if takes_share and share is None:
            raise Restyle(name, SPLIT_INPUT)
        if features and style in (WHOLE, SPLIT_INPUT):
            raise Restyle(name, ROWWISE)
        if share is not None and not (takes_share and features):
            raise NotShared(f"{name} is given a share", share.sources)
        width = linear.out_features
        if style == COLWISE:
            if any(size % parts for size in sections or (width,)):
                raise NotShared(f"the {width} features of {name} do not divide over {parts}", frozenset((name,)))
            width //= parts
        out = input.new_full((*input.shape[:-1], width), SMALL)
        if style == COLWISE:
            latest.append(name)
        made = Share(input.dim() - 1, parts, frozenset((name,)), sections)
        return mark_share(out, made if style == COLWISE else None)

    return forward
