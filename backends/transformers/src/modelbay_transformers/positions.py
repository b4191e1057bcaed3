"""Positions for models whose forward takes none: handed to the module that looks them up.

Decoders of the BART kind number their tokens themselves and pass ``position_ids`` to one of their children. There, and
only there, ours take the place of theirs; that no other part of the model numbers tokens is for the probe to see.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

_GIVER = "_modelbay_positions"


def give_positions(base: nn.Module, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions [1, T] for the next forward: to the `PositionGiver`, if there is one, and as the argument that carries
    them, if forward takes it (or hands on what it does not know)."""
    giver = PositionGiver.find(base)
    if giver is not None:
        giver.positions = positions
    names = inspect.signature(base.forward).parameters
    return {"position_ids": positions} if "position_ids" in names or "kwargs" in names else {}


def takes_positions(base: nn.Module) -> bool:
    """Whether forward says that it takes ``position_ids``."""
    return "position_ids" in inspect.signature(base.forward).parameters


class PositionGiver:
    """Hooks on the children of one model that take ``position_ids``. ``positions``: [1, T], set before each forward."""

    def __init__(self, base: nn.Module) -> None:
        self.positions: torch.Tensor | None = None
        for module in base.modules():
            if module is not base and "position_ids" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(self._replace, with_kwargs=True)
        base.__dict__[_GIVER] = self

    @staticmethod
    def find(base: nn.Module) -> PositionGiver | None:
        return base.__dict__.get(_GIVER)

    def _replace(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        theirs = kwargs.get("position_ids")
        if not isinstance(theirs, torch.Tensor) or self.positions is None:
            return None
        return args, {**kwargs, "position_ids": self.positions.view_as(theirs)}
