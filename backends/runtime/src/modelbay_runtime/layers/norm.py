"""Normalisation."""

from __future__ import annotations

import math

import torch
from torch import nn

from modelbay.errors import ConfigError
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import parameter


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, [T, H] -> [T, H]."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
            raise ConfigError(f"the config's epsilon of norms must be a small number of at least 0, got {eps!r}.")
        self.weight = parameter((size,), build.dtype)
        self.eps = eps
        self.kernel = build.op("rms_norm", size=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(x, self.weight, self.eps)
