"""Towers in a dtype of their own (``dtype="backbone"``): built in it, and what they give is cast on its way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def keep_dtypes(outer: nn.Module, language_model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Set the towers of ``outer`` (parameters on meta) to their dtypes; the rest stays in that of the language model.

    Args:
        dtypes: of sub-configs, by the dotted keys that lead to them (``ModelConfig.backbone_dtypes``).

    Returns:
        The names of the modules that were set, and to what.
    """
    served = set(language_model.modules())
    default = next(language_model.parameters()).dtype
    found: dict[str, str] = {}
    for path, dtype in dtypes.items():
        config = _at(outer.config, path) if path else None
        for name, module in outer.named_modules():
            inside = any(name.startswith(f"{other}.") for other in found)
            if config is None or module in served or inside or getattr(module, "config", None) is not config:
                continue
            if dtype != default:
                module.to(dtype)
                module.register_forward_hook(lambda module, args, output: _cast(output, default))
                found[name] = str(dtype).removeprefix("torch.")
    return found


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = getattr(config, key, None)
    return config


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a module's output."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if is_dataclass(value):
        for field in fields(value):
            found = getattr(value, field.name)
            if found is not None:
                setattr(value, field.name, _cast(found, dtype))
    return value
