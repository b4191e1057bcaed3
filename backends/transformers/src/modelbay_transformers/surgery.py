"""Replace Transformers' linears by the runtime's: the same product, its weight in the form that multiplies fastest.

Only linears that the probe saw being called are touched. One whose weight is read in another way is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.embedding import Head
from modelbay_runtime.layers.linear import Linear


def replace_linears(build: BuildContext, model: nn.Module, names: Iterable[str]) -> int:
    """Replace the named ``nn.Linear`` modules; returns how many."""
    replaced = 0
    for name in names:
        old: Any = model.get_submodule(name)
        new = Linear(build, old.in_features, old.out_features, bias=old.bias is not None)
        if old.weight.dtype != build.dtype:
            continue  # kept in another precision on purpose
        _set(model, name, new)
        replaced += 1
    return replaced


def replace_head(build: BuildContext, model: nn.Module, name: str, tied_to: str | None) -> None:
    """Replace the linear over the vocabulary, and say which parameter it shares."""
    old: Any = model.get_submodule(name)
    new = Head(build, old.in_features, old.out_features, tied_to=tied_to)
    if old.bias is not None:
        new.bias = old.bias  # the same parameter: it may be tied to one beside it
    _set(model, name, new)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module
