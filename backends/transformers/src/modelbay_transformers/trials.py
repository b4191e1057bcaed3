"""Replace small modules by the runtime's kernels, where a trial on random numbers proves that they compute the same.

Candidates are found by their parameters: a norm has one vector, a gated feed-forward three matrices. What they compute
is tried, per class and settings, in float32.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels.ops import rms_norm
from modelbay_runtime.layers.norm import RMSNorm

_TOLERANCE = 1e-5


class AnyRMSNorm(RMSNorm):
    """The runtime's norm for an input with any leading dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def replace_norms(build: BuildContext, base: nn.Module) -> int:
    """Replace modules that are an RMSNorm over the last dimension, weight as it is; returns how many."""
    verdicts: dict[Any, bool] = {}
    replaced = 0
    modules: list[tuple[str, Any]] = list(base.named_modules())
    for name, module in modules:
        eps = _norm_eps(module)
        if eps is None or module.weight.dtype != build.dtype:
            continue
        key = (type(module), tuple(module.weight.shape), eps)
        if key not in verdicts:
            verdicts[key] = _is_rms_norm(module, eps)
        if verdicts[key]:
            base.set_submodule(name, AnyRMSNorm(build, module.weight.shape[0], eps))
            replaced += 1
    return replaced


def _norm_eps(module: Any) -> float | None:
    """The epsilon of a module that could be an RMSNorm."""
    if isinstance(module, RMSNorm) or module._modules or list(module._parameters) != ["weight"]:
        return None
    if module.weight is None or module.weight.ndim != 1:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _is_rms_norm(module: Any, eps: float) -> bool:
    size = module.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    trial = copy.deepcopy(module)
    trial._parameters["weight"] = nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)
    # Small values, so that an epsilon in another place shows.
    x = torch.randn(1, 3, size, generator=generator) * torch.tensor([1e-3, 1.0, 30.0])[None, :, None]
    try:
        with torch.no_grad():
            found = trial(x.clone())
            return isinstance(found, torch.Tensor) and torch.allclose(
                found, rms_norm(x, trial.weight, eps), rtol=_TOLERANCE, atol=_TOLERANCE
            )
    except Exception:  # it takes more than its input: not a plain norm
        return False
