"""Build a Transformers model with its parameters on meta and its buffers real.

Buffers (rotary frequencies, position ids, masks) are computed in constructors; on the meta device they would be lost,
and a checkpoint does not have them. Parameters are made of uninitialised memory; that is what goes to meta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_UNINITIALISED = {torch.empty, torch.rand, torch.randn, torch.normal}
_FILLED = {torch.zeros, torch.ones, torch.full}

#: Filled tensors beyond this many elements are parameters (a table of zeros), not buffers.
_LARGE = 1 << 26


class ParametersOnMeta(TorchFunctionMode):
    """Uninitialised tensors are made on meta; everything that is computed stays real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is None and (func in _UNINITIALISED or (func in _FILLED and _elements(args) > _LARGE)):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _elements(shape: Any) -> int:
    count = 1
    for item in shape:
        for size in item if isinstance(item, (tuple, list, torch.Size)) else (item,):
            count *= size if isinstance(size, int) else 1
    return count


def build_on_meta(model_class: Any, config: Any, attention: str | None, dtype: torch.dtype) -> nn.Module:
    """An instance in eval mode, parameters on meta (shared ones stay shared), buffers real on CPU.

    Args:
        attention: the name of the function that attends; None: as Transformers chooses, for each part.
    """
    with ParametersOnMeta():
        model = model_class._from_config(config, attn_implementation=attention, dtype=dtype)
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = moved[id(parameter)]
    return model.eval()
