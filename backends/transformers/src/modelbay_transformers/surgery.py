"""Replace Transformers' linears by the runtime's: the same product, its weight in the form that multiplies fastest.

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
        _set(model, name, new)
        replaced += 1
    return replaced


def input_embedding(model: Any) -> Any:
    """The table of tokens of ``model``, as its class says; None if it does not say."""
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


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
    _set(model, name, new)


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


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module
