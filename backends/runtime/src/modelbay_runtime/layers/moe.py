"""Mixture of experts: a router, routed experts, and experts that every token goes through.

Legend: T tokens, H hidden size, E experts, G groups of experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from modelbay.errors import ConfigError
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.linear import parameter
from modelbay_runtime.layers.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a token's experts are chosen and weighed.

    Args:
        experts: E. top_k: k.
        scoring: of the router's logits: over all experts ("softmax") or each by itself ("sigmoid").
        groups: G; experts are chosen within the ``top_groups`` best groups only.
        group_members: a group's rank is the sum of the scores of its best so many members.
        renormalise: divide the chosen experts' scores by their sum.
        scale: the weights' factor, after that.

    Raises:
        ConfigError: numbers that do not go together, with the numbers.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_members: int = 1
    renormalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"experts are scored by {self.scoring!r}; softmax and sigmoid are known.")
        if self.groups < 1 or self.experts % self.groups:
            raise ConfigError(f"{self.experts} experts do not divide into {self.groups} groups.")
        if not 1 <= self.top_groups <= self.groups:
            raise ConfigError(f"experts are chosen from {self.top_groups} of {self.groups} groups.")
        size = self.experts // self.groups
        if self.groups > 1 and size < self.group_members:
            raise ConfigError(f"a group is ranked by {self.group_members} experts and has {size}.")
        if not 1 <= self.top_k <= size * self.top_groups:
            raise ConfigError(f"a token goes to {self.top_k} experts and may choose from {size * self.top_groups}.")


def route(
    logits: torch.Tensor, spec: RoutingSpec, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's experts, best first; of equal ones the lowest number.

    Args:
        logits: [T, E] float32.
        correction: [E], added to the scores for choosing and not for weighing (Wang et al., 2024).

    Returns:
        ids [T, k] int64, weights [T, k] float32.
    """
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if spec.groups > 1:
        by_group = ranks.unflatten(-1, (spec.groups, -1))
        group_ranks = by_group.topk(spec.group_members, -1).values.sum(-1)  # [T, G]
        kept = torch.zeros_like(group_ranks, dtype=torch.bool).scatter_(-1, _best(group_ranks, spec.top_groups), True)
        ranks = by_group.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = _best(ranks, spec.top_k)
    weights = scores.gather(-1, ids)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * spec.scale


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the largest, best first. ``topk`` leaves open which of equal values it takes."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class Router(nn.Module):
    """[T, H] -> ids [T, k], weights [T, k]. In float32, since close scores decide which experts run.

    Args:
        corrected: whether there is a ``correction`` [E].
    """

    def __init__(self, build: BuildContext, hidden_size: int, spec: RoutingSpec, *, corrected: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.weight = parameter((spec.experts, hidden_size), torch.float32)
        self.correction = parameter((spec.experts,), torch.float32) if corrected else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(F.linear(x.float(), self.weight), self.spec, self.correction)


class Experts(nn.Module):
    """The routed experts' gated MLPs, each kind of weight in one parameter."""

    def __init__(
        self, build: BuildContext, experts: int, hidden_size: int, intermediate_size: int, activation: str
    ) -> None:
        super().__init__()
        self.gate_up_proj = parameter((experts, 2 * intermediate_size, hidden_size), build.dtype)
        self.down_proj = parameter((experts, hidden_size, intermediate_size), build.dtype)
        self.activation = activation
        self.kernel = build.op(
            "experts",
            experts=experts, hidden_size=hidden_size, intermediate_size=intermediate_size, activation=activation,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; ids, weights: [T, k] -> [T, H]."""
        return self.kernel(x, self.gate_up_proj, self.down_proj, ids, weights, self.activation)


class SparseMoE(nn.Module):
    """Routed experts, shared experts, and the residual, summed; ``shared_intermediate_size`` 0: none are shared."""

    def __init__(
        self,
        build: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        routing: RoutingSpec,
        *,
        corrected: bool = False,
        shared_intermediate_size: int = 0,
    ) -> None:
        super().__init__()
        self.gate = Router(build, hidden_size, routing, corrected=corrected)
        self.experts = Experts(build, routing.experts, hidden_size, intermediate_size, activation)
        self.shared_experts = None
        if shared_intermediate_size:
            self.shared_experts = GatedMLP(build, hidden_size, shared_intermediate_size, activation)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        routed = self.experts(x, *self.gate(x))
        if self.shared_experts is not None:
            residual = self.shared_experts(x, residual)
        return routed.add_(residual)
