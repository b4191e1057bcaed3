"""Find and replace modules of Transformers' model: linears and the head become the runtime's, the same product with its
weight in the form that multiplies fastest.

Only linears that the probe saw being called are touched. One whose weight is read in another way is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.embedding import Head
from modelbay_runtime.layers.linear import Linear, parameter


def replace_linears(build: BuildContext, model: nn.Module, names: Iterable[str]) -> int:
    """Replace the named ``nn.Linear`` modules; returns how many."""
    replaced = 0
    for name in names:
        old: Any = model.get_submodule(name)
        if "weight" not in old._parameters:
            continue  # another stage of the pipeline has it
        new = Linear(build, old.in_features, old.out_features, bias=old.bias is not None)
        if old.weight.dtype != build.dtype:
            continue  # kept in another precision on purpose
        model.set_submodule(name, new)
        replaced += 1
    return replaced


def module_name(model: nn.Module, module: nn.Module | None) -> str | None:
    """The name of ``module`` in ``model``; None if it is not in it."""
    return next((name for name, found in model.named_modules() if found is module), None)


def token_table(outer: nn.Module, base: nn.Module) -> Any:
    """The embedding of tokens, as the class around the base model says, or the base model's; None if neither says."""
    for model in (outer, base):
        try:
            table = model.get_input_embeddings()  # type: ignore[operator]
        except (NotImplementedError, AttributeError):
            continue
        if table is not None:
            return table
    return None


def held_besides(model: nn.Module, weight: torch.Tensor | None, *holders: nn.Module | None) -> bool:
    """Whether a module of ``model`` other than ``holders`` has this very parameter too."""
    others = (module for module in model.modules() if not any(module is holder for holder in holders))
    return weight is not None and any(p is weight for module in others for p in module._parameters.values())


class AnyHead(Head):
    """The runtime's head for an input with any leading dimensions."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def replace_head(build: BuildContext, model: nn.Module, name: str, tied_to: str | None) -> None:
    """Replace the linear over the vocabulary, and say which parameter it shares."""
    old: Any = model.get_submodule(name)
    new = AnyHead(build, old.in_features, old.out_features, tied_to=tied_to)
    if old.bias is not None:
        _keep_bias(build, model, old, new)
    model.set_submodule(name, new)


def _keep_bias(build: BuildContext, model: nn.Module, old: Any, new: Head) -> None:
    """The same parameter, which may be tied to one beside it; over several ranks, each holder's is the rank's part."""
    bias = old.bias
    if build.parallel.tp.size > 1:
        bias = parameter((new.out_features,), old.bias.dtype)
        for module in model.modules():
            for key, value in module._parameters.items():
                if value is old.bias and module is not old:
                    module._parameters[key] = bias
                    module.shards = {**getattr(module, "shards", {}), key: new.shards["weight"]}  # type: ignore[assignment]
        new.shards["bias"] = new.shards["weight"]
    new.bias = bias
