"""In front of a language model's forward, inside the model that it is part of: what arrives can be taken, and what
comes out can be given.

So the code of the model around it (merging features into embeddings, a head of its own) does its work, whatever it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from modelbay_transformers.base_output import BaseOutput


class Arrived(BaseException):
    """What the model around gave to its language model; ends its forward there. No Exception: none of its handlers is
    meant."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Gate:
    """Installed once on ``language_model``."""

    def __init__(self, language_model: nn.Module) -> None:
        self._taking = False
        self._hidden: torch.Tensor | None = None
        served = language_model.forward

        @functools.wraps(served)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._taking:
                raise Arrived(kwargs)
            if self._hidden is not None:
                return BaseOutput(self._hidden)
            return served(*args, **kwargs)

        language_model.__dict__["forward"] = forward

    def take(self, outer: nn.Module, **inputs: Any) -> dict[str, Any]:
        """Run ``outer`` up to its language model and return the arguments that arrive."""
        self._taking = True
        try:
            outer(**inputs)
        except Arrived as arrived:
            return arrived.arguments
        finally:
            self._taking = False
        raise AssertionError(f"{type(outer).__name__} ran without its language model")

    def give(self, outer: nn.Module, hidden: torch.Tensor, **inputs: Any) -> Any:
        """Run ``outer`` as if its language model had given ``hidden`` [1, R, H]."""
        self._hidden = hidden
        try:
            return outer(**inputs)
        finally:
            self._hidden = None
