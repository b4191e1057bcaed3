"""What stands in the place of a module that another rank holds."""

from __future__ import annotations

from typing import Any

from torch import nn


class Absent(nn.Module):
    """Nothing: no parameters, and calling it is a bug. The loader reads no tensor under its name.

    Args:
        rule: who holds it, as `modelbay_runtime.layout` has it in ``held_elsewhere``.
        weight_tied_to: the parameter of this rank that its ``weight`` is, if the config ties word embeddings.
    """

    def __init__(self, rule: str, weight_tied_to: str | None = None) -> None:
        super().__init__()
        self.held_elsewhere = rule
        self.weight_tied_to = weight_tied_to

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a module was run that is not on this rank: {self.held_elsewhere} has it")
