"""The runtime's experts in the place of a model's, where a trial shows that they give the same.

Legend: E experts, H hidden size, I intermediate size, k experts per token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from modelbay.plugins import Plugins
from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels.ops import ACTIVATIONS
from modelbay_runtime.kernels.table import REFERENCE, KernelTable
from modelbay_runtime.layers.moe import Experts
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers.expert_trials import EXPERTS, same, tiny_copy, tiny_inputs

_STANDARD = {"gate_up_proj", "down_proj"}


class RoutedExperts(Experts):
    """The runtime's experts, called as Transformers calls its own."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [..., H]; top_k_index, top_k_weights: [..., k] -> [..., H]."""
        flat = hidden_states.flatten(0, -2)
        ids, weights = (x.reshape(flat.shape[0], -1) for x in (top_k_index, top_k_weights))
        return super().forward(flat, ids.long(), weights.float()).view(hidden_states.shape)


def find_activation(build: BuildContext, plugins: Plugins, module: Any, count: int, hidden_size: int) -> str | None:
    """The activation with which the runtime's experts give the same; None if there is none."""
    shapes = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    if isinstance(module, nn.ModuleList) or set(shapes) != _STANDARD:
        return None
    (_, double, width), (_, hidden, inner) = shapes["gate_up_proj"], shapes["down_proj"]
    if double != 2 * inner or (width, hidden) != (hidden_size, hidden_size):
        return None
    copied = tiny_copy(module, count, hidden_size)
    if copied is None:
        return None
    (tiny, small), cpu = copied, torch.device("cpu")
    inputs, down = tiny_inputs(small), tiny.down_proj
    table = KernelTable(plugins, cpu, torch.float32, kernels=REFERENCE)
    trial = dataclasses.replace(build, dtype=torch.float32, device=cpu, kernels=table, parallel=ParallelContext())
    try:
        with torch.no_grad():
            expected = tiny(*(x.clone() for x in inputs))
            for activation in ACTIVATIONS:
                ours = RoutedExperts(trial, EXPERTS, down.shape[1], down.shape[2], activation)
                ours.gate_up_proj, ours.down_proj = tiny.gate_up_proj, down
                if same(ours(*inputs), expected):
                    return activation
    except Exception:  # whatever it needs, it is not the runtime's module
        return None
    return None


def replace_experts(build: BuildContext, base: nn.Module, name: str, module: Any, activation: str) -> tuple[str, str]:
    """Put the runtime's experts where ``module`` is; returns how they are divided, and why so."""
    experts, hidden, inner = module.down_proj.shape
    own = dataclasses.replace(build, dtype=module.down_proj.dtype)
    new = RoutedExperts(own, experts, hidden, inner, activation)
    for key, value in vars(module).items():
        if not key.startswith("_") and key not in vars(new) and isinstance(value, (int, float, str, bool)):
            setattr(new, key, value)  # the model's code may read it
    base.set_submodule(name, new)
    split = build.parallel.mesh.expert_parallel
    how = "ep_dispatch_experts: experts split over ranks" if split else "moe_tp_experts: each expert sliced"
    return how, "trial: the runtime's experts give the same"
