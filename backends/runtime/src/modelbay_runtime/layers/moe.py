"""Mixture of experts: a router, routed experts, and experts that every token goes through.

Legend: T tokens, H hidden size, E experts, G groups of experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from modelbay.errors import ConfigError
from modelbay.weights.fp8 import BlockScales
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.block_scales import Cut, ScaledWeight
from modelbay_runtime.layers.linear import parameter
from modelbay_runtime.layers.mlp import GatedMLP
from modelbay_runtime.layout import Section, Shard
from modelbay_runtime.parallel.exchange import exchange
from modelbay_runtime.parallel.sizes import padded_share_of, share_of


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
    """The routed experts' gated MLPs, each kind of weight in one parameter.

    Over several ranks either each expert is sliced over those that share a layer, or, where experts are parallel, each
    rank has some experts whole. Then replicas see different tokens, and send them to where their experts are; the ranks
    of one replica see the same ones, and need not.
    """

    counts: torch.Tensor
    styles: ClassVar[Mapping[str, str]] = {
        "": "moe_tp_experts", "gate_up_proj": "packed_colwise", "down_proj": "rowwise",
    }  # fmt: skip

    def __init__(
        self, build: BuildContext, experts: int, hidden_size: int, intermediate_size: int, activation: str
    ) -> None:
        super().__init__()
        parallel = build.parallel
        self.tp, self.ep = parallel.tp, parallel.ep
        self.exchanged = parallel.mesh.expert_parallel and parallel.mesh.dp > 1
        self.experts = experts
        held = share_of(experts, self.ep.rank, self.ep.size, "experts")
        self.first, self.held = held.start, held.size
        self.shards: dict[str, Shard] = {}
        inner = intermediate_size
        if parallel.mesh.expert_parallel and self.ep.size > 1:
            mine = Shard(0, held.start, held.size, total=experts)
            self.shards = {"gate_proj": mine, "up_proj": mine, "down_proj": mine}
        elif self.tp.size > 1 and not parallel.mesh.expert_parallel:
            share = share_of(intermediate_size, self.tp.rank, self.tp.size, "the experts' intermediate_size")
            inner, rows = share.size, Shard(1, share.start, share.size, total=intermediate_size)
            columns = Shard(2, share.start, share.size, total=intermediate_size)
            self.shards = {"gate_proj": rows, "up_proj": rows, "down_proj": columns}
        halves = Section("gate_proj", 0, inner, 1), Section("up_proj", inner, inner, 1)
        self.parts: dict[str, tuple[Section, ...]] = {"gate_up_proj": halves}
        self.gate_up_proj = parameter((self.held, 2 * inner, hidden_size), build.dtype)
        self.down_proj = parameter((self.held, hidden_size, inner), build.dtype)
        self.activation = activation
        self.kernel = build.op(
            "experts", experts=self.held, hidden_size=hidden_size, intermediate_size=inner, activation=activation
        )
        self.scaled: tuple[ScaledWeight, ScaledWeight] | None = None
        # One more than there are experts: that of the tokens which are for other ranks.
        counts = torch.zeros(self.held + 1, dtype=torch.int64, device=build.device)
        self.register_buffer("counts", counts, persistent=False)

    def hold_blocks(self, build: BuildContext, blocks: BlockScales) -> None:
        """Hold the weights in 8 bits with the scales of their blocks beside them, and apply them in the products."""
        shards, (_, hidden, inner) = self.shards, self.down_proj.shape
        rows = Cut.of(inner, shards.get("gate_proj"), 1)
        gate_up = ScaledWeight(self, "gate_up_proj", blocks, (rows, rows), Cut.of(hidden, None, 2), dim=1)
        columns = Cut.of(inner, shards.get("down_proj"), 2)
        down = ScaledWeight(self, "down_proj", blocks, (Cut.of(hidden, None, 1),), columns, dim=1)
        self.scaled, self.scale_parameters = (gate_up, down), (gate_up.scale_name, down.scale_name)
        self.parts[gate_up.scale_name] = gate_up.sections(("gate_proj", "up_proj"), blocks.suffix, 1)
        for name, scaled in (("gate_proj", gate_up), ("up_proj", gate_up), ("down_proj", down)):
            if (own := scaled.shard(scaled.rows[0], shards.get(name), 1)) is not None:
                shards[name + blocks.suffix] = own
        self.kernel = build.op(
            "experts_blocks", experts=self.held, hidden_size=hidden, intermediate_size=inner, activation=self.activation
        )

    @property
    def repacked(self) -> tuple[str, ...]:
        """See `modelbay_runtime.layout`."""
        return ("gate_up_proj", "down_proj") if getattr(self.kernel, "repacks", False) else ()

    def post_load(self) -> None:
        """The weights are complete: bring each expert's into the form that the kernel multiplies fastest."""
        for scaled in self.scaled or ():
            scaled.post_load(self)
        pack = getattr(self.kernel, "pack", None)
        if pack is None:
            return
        for name in ("gate_up_proj", "down_proj"):
            weight = self._parameters.pop(name)
            assert weight is not None, "packed once"
            setattr(self, name, nn.ParameterList(nn.Parameter(pack(each), requires_grad=False) for each in weight))

    @property
    def expert_load(self) -> torch.Tensor:
        """[experts held here] int64: how many tokens each has computed since the model was loaded."""
        return self.counts[: self.held]

    def partial(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """This rank's summand of what `forward` returns, over the ranks that share a layer: a tensor of its own."""
        if not self.exchanged:
            return self._own(x, ids, weights)
        mine = self._own_tokens(x.shape[0])
        total = torch.zeros_like(x)
        total[mine] = self._exchange(x[mine], ids[mine], weights[mine])
        return total

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; ids, weights: [T, k] -> [T, H], a tensor of its own. T may be 0 where tokens are exchanged: other
        ranks wait for this one's part."""
        if not self.exchanged or self.tp.size == 1:
            return self.tp.all_reduce(self.partial(x, ids, weights))
        mine = self._own_tokens(x.shape[0])
        out = self._exchange(x[mine], ids[mine], weights[mine])
        if not x.shape[0]:
            return out
        missing = -(-x.shape[0] // self.tp.size) - out.shape[0]
        return self.tp.all_gather(F.pad(out, (0, 0, 0, missing)), 0)[: x.shape[0]]

    def _own_tokens(self, count: int) -> slice:
        """Of the tokens that all ranks of a replica see, those that this one sends out."""
        share = padded_share_of(count, self.tp.rank, self.tp.size)
        return slice(share.start, share.start + share.size)

    def _exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return exchange(x, ids, weights, self.held, self.ep, self._own)

    def _own(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts held here give."""
        if self.held < self.experts:
            ids = ids - self.first
            ids = ids.masked_fill((ids < 0) | (ids >= self.held), self.held)
        flat = ids.flatten()
        self.counts.index_add_(0, flat, torch.ones_like(flat))
        if self.scaled is None:
            return self.kernel(x, self.gate_up_proj, self.down_proj, ids, weights, self.activation)
        held = [(getattr(self, each.name), getattr(self, each.scale_name), each.block) for each in self.scaled]
        return self.kernel(x, *held[0], *held[1], ids, weights, self.activation)


class SparseMoE(nn.Module):
    """Routed experts, shared experts, and the residual, summed; ``shared_intermediate_size`` 0: none are shared.

    Shared experts see every token: they are sliced over the ranks that share a layer, whether or not experts are
    parallel, and their sum over ranks is that of the routed ones.
    """

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
        self.all_reduce = build.parallel.all_reduce

    @property
    def expert_load(self) -> torch.Tensor:
        """See `Experts.expert_load`."""
        return self.experts.expert_load

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [T, H] -> [T, H]."""
        ids, weights = self.gate(x)
        if self.shared_experts is None:
            return self.experts(x, ids, weights).add_(residual)
        shared = self.shared_experts.partial(x, residual)
        return self.all_reduce(self.experts.partial(x, ids, weights).add_(shared))
