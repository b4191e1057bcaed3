"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import Linear, PackedLinear


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x)) + residual`` (Shazeer, 2020), [T, H] -> [T, H]."""

    def __init__(
        self, build: BuildContext, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = PackedLinear(build, hidden_size, parts, bias=bias)
        self.down_proj = Linear(build, intermediate_size, hidden_size, bias=bias, style="rowwise")
        self.activation = activation
        self.act_and_mul = build.op("act_and_mul", activation=activation)

    def partial(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's summand of what `forward` returns; the residual is in the first rank's."""
        return self.down_proj.partial(self.act_and_mul(self.gate_up_proj(x), self.activation), residual)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.down_proj(self.act_and_mul(self.gate_up_proj(x), self.activation), residual)
