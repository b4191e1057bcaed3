"""Normalisation."""

from __future__ import annotations

import torch
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import parameter


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, [T, H] -> [T, H]."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter((size,), build.dtype)
        self.eps = eps
        self.kernel = build.op("rms_norm", size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x, self.weight, self.eps)
