"""Rotary position embedding: tables once per instance, one look-up per step, one turn per layer.

Legend: T tokens, R rotary dimensions (even), L positions.
"""

from __future__ import annotations

import torch
from torch import nn

from modelbay.errors import ConfigError
from modelbay.rope import RopeSpec
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.rotary_frequencies import inverse_frequencies

#: Numbers of a table: those of ten million positions of a head of 128, and some more.
_LARGEST = 1 << 31


class Rotary(nn.Module):
    """cos and sin of every position up to the instance's longest, from one RopeSpec.

    ``interleaved`` tables are for the op ``rotary_interleaved``, the others for ``rotary``. The tables are real while
    the module is on meta: they are not parameters and no checkpoint fills them.
    """

    table: torch.Tensor  # [2, L, R]: cos, and sin with its first half negated

    def __init__(self, build: BuildContext, rope: RopeSpec, *, interleaved: bool = False) -> None:
        super().__init__()
        if build.max_model_len * rope.rotary_dim > _LARGEST:
            raise ConfigError(
                f"max_model_len {build.max_model_len:,} with {rope.rotary_dim} rotary dimensions needs a table of more "
                f"than {_LARGEST:,} numbers.",
                hint="Give a smaller max_model_len.",
            )
        # What the model was made for, not the length that is served: factors of the former must not follow the latter.
        trained_len = build.config.get("max_position_embeddings", build.config.max_model_len)
        inv_freq, factor = inverse_frequencies(rope, build.max_model_len, trained_len)
        with torch.device(build.device):
            angles = torch.outer(torch.arange(build.max_model_len, dtype=torch.float32), inv_freq.to(build.device))
            cos, sin = angles.cos() * factor, angles.sin() * factor
            # The sign of the swapped half lives in the table, so that a turn is two products and a swap.
            join = _interleave if interleaved else _halves
            table = torch.stack((join(cos, cos), join(-sin, sin)))  # [2, L, R]
        self.register_buffer("table", table.to(build.dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] -> cos [T, 1, R] and signed sin [T, 1, R], in the model's dtype."""
        cos, sin = self.table.index_select(1, positions).unsqueeze(2)
        return cos, sin


def _halves(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat((first, second), -1)


def _interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.stack((first, second), -1).flatten(-2)
