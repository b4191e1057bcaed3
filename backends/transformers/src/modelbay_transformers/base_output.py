"""What a base model returns, for code around it that does not care which of Transformers' output classes it is."""

from __future__ import annotations

from typing import Any

import torch


class BaseOutput:
    """Hidden states [n, T, H], what was pooled of them [n, H] if anything was, and None for whatever else is asked."""

    def __init__(self, last_hidden_state: torch.Tensor, pooler_output: torch.Tensor | None = None) -> None:
        self.last_hidden_state, self.pooler_output = last_hidden_state, pooler_output

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return getattr(self, index)
        values = (self.last_hidden_state, self.pooler_output)
        return (values if self.pooler_output is not None else values[:1])[index]

    def keys(self) -> tuple[str, ...]:
        """Models that hand on an output as keyword arguments ask for its names."""
        return ("last_hidden_state",) if self.pooler_output is None else ("last_hidden_state", "pooler_output")
