"""Experts over several ranks (BEHAVIOUR X7).

Where a trial shows that an experts module computes what the runtime's does, that one takes its place: each expert is
sliced over the ranks that share a layer, or experts are split over all ranks and tokens sent to them. Any other is kept
with this rank's experts in it: what a token's other experts give is weighed with zero here, and the sum over ranks is
taken. What a trial does not show to stay the same is whole on every rank.

Legend: E experts, H hidden size, I intermediate size, k experts per token, T tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay.plugins import Plugins
from modelbay.trace import Trace
from modelbay.weights.matching import ANOTHER_EXPERT
from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels.ops import ACTIVATIONS
from modelbay_runtime.kernels.table import REFERENCE, KernelTable
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.linear import parameter
from modelbay_runtime.layers.moe import Experts
from modelbay_runtime.layout import Shard
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.groups import Group
from modelbay_transformers.expert_trials import EXPERTS, same, takes_routing, tiny_copy, tiny_inputs
from modelbay_transformers.plans import pattern_of

_STANDARD = {"gate_up_proj", "down_proj"}
#: A list of experts is tried in float32 as it is, up to this many parameters.
_LARGEST = 100_000_000


class RoutedExperts(Experts):
    """The runtime's experts, called as Transformers calls its own."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [..., H]; top_k_index, top_k_weights: [..., k] -> [..., H]."""
        flat = hidden_states.flatten(0, -2)
        ids, weights = (x.reshape(flat.shape[0], -1) for x in (top_k_index, top_k_weights))
        return super().forward(flat, ids.long(), weights.float()).view(hidden_states.shape)


def divide_experts(build: BuildContext, plugins: Plugins, base: nn.Module, trace: Trace) -> None:
    """Divide every child ``experts`` of ``base``.

    Raises:
        BackendError: experts are to be parallel, and none of the model's can be.
    """
    parallel = build.parallel
    if parallel.tp.size == 1 and parallel.ep.size == 1:
        return
    kinds: dict[tuple[str, str, str], int] = {}
    verdicts: dict[Any, str | None] = {}
    for name, module in list(base.named_modules()):
        if name.rpartition(".")[2] != "experts" or isinstance(module, Experts):
            continue
        how, reason = _divide(build, plugins, base, name, module, verdicts)
        kinds[pattern_of(name), how, reason] = kinds.get((pattern_of(name), how, reason), 0) + 1
    for (pattern, how, reason), count in kinds.items():
        trace.decide("plan", pattern, f"{how} × {count}", reason)
    if parallel.mesh.expert_parallel and kinds and all(how == "replicated" for _, how, _ in kinds):
        reasons = "; ".join(sorted({reason for _, _, reason in kinds}))
        raise BackendError(f"enable_expert_parallel: the experts of {type(base).__name__} cannot be split: {reasons}.")


def _divide(
    build: BuildContext,
    plugins: Plugins,
    base: nn.Module,
    name: str,
    module: Any,
    verdicts: dict[Any, str | None],
) -> tuple[str, str]:
    """How the experts are divided, and why so."""
    if not takes_routing(module):
        return "replicated", "its forward does not take each token's experts and their weights"
    hidden_size = base.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]
    count = _count(module)
    if count is None:
        return "replicated", "its parameters are not one entry for each expert"
    key = (type(module), tuple(tuple(p.shape) for p in module.parameters()), _plain(module))
    if key not in verdicts:
        verdicts[key] = _activation(build, plugins, module, count, hidden_size)
    activation = verdicts[key]
    if activation is not None:
        return _replace(build, base, name, module, activation)
    group = build.parallel.tp
    if group.size == 1:
        return "replicated", "replicas exchange tokens only for experts that are the runtime's"
    if count % group.size:
        return "replicated", f"{count} experts do not divide over {group.size} ranks"
    whole = ("whole", *key)
    if whole not in verdicts:
        verdicts[whole] = "" if _splits(module, count, hidden_size) else None
    if verdicts[whole] is None:
        return "replicated", "a trial of its parts gives something else than the whole"
    _keep_own(module, group, count)
    return "experts split over the ranks that share the layer", "trial: parts of it sum up to the whole"


def _plain(module: Any) -> tuple[Any, ...]:
    return tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, (int, float, str, bool)))


def _count(module: Any) -> int | None:
    """E, if the module is a list of experts, or every parameter has one entry for each."""
    if isinstance(module, nn.ModuleList):
        return len(module) if len(module) and not module._parameters else None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    counts = {p.shape[0] for p in module._parameters.values() if p is not None}
    ranks = {p.ndim for p in module._parameters.values() if p is not None}
    return counts.pop() if len(counts) == 1 and ranks <= {2, 3} and 3 in ranks else None


# The runtime's experts


def _activation(build: BuildContext, plugins: Plugins, module: Any, count: int, hidden_size: int) -> str | None:
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


def _replace(build: BuildContext, base: nn.Module, name: str, module: Any, activation: str) -> tuple[str, str]:
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


# Kept, with a part of the experts in it


def _splits(module: Any, count: int, hidden_size: int) -> bool:
    """Whether the sum of two halves, each of them as a rank would have it, is what the whole gives."""
    try:
        with torch.no_grad():
            return _list_splits(module, hidden_size) if _is_list(module) else _packed_splits(module, count, hidden_size)
    except Exception:  # what cannot be tried is not split
        return False


def _is_list(module: Any) -> bool:
    return isinstance(module, nn.ModuleList)


def _packed_splits(module: Any, count: int, hidden_size: int) -> bool:
    copied = tiny_copy(module, count, hidden_size)
    if copied is None:
        return False
    (tiny, small), half = copied, EXPERTS // 2
    inputs = tiny_inputs(small)
    expected, total = tiny(*(x.clone() for x in inputs)), torch.zeros_like(inputs[0])
    for first in (0, half):
        part = copy.copy(tiny)
        part.__dict__ = {**tiny.__dict__, "_parameters": dict(tiny._parameters)}
        _take(part, first, half, EXPERTS)
        for key, whole in tiny._parameters.items():
            if whole is not None:
                part._parameters[key] = nn.Parameter(whole[first : first + half], requires_grad=False)
        total = total + part(*_own(inputs, first, half, 0))
    return same(total, expected)


def _list_splits(experts: nn.ModuleList, hidden_size: int) -> bool:
    if sum(p.numel() for p in experts.parameters()) > _LARGEST:
        return False
    whole, total_experts = copy.deepcopy(experts), len(experts)
    generator = torch.Generator().manual_seed(0)
    for module in whole.modules():
        for key, p in module._parameters.items():
            if p is not None:
                value = torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
    inputs = tiny_inputs(hidden_size, total_experts)
    expected, total, half = whole(*inputs), torch.zeros_like(inputs[0]), total_experts // 2
    for first, count in ((0, half), (half, total_experts - half)):
        part = copy.copy(whole)
        part.__dict__ = {**whole.__dict__, "_modules": dict(whole._modules)}
        _take_of_list(part, first, count)
        total = total + part(*_own(inputs, first, count, first))
    return same(total, expected)


def _own(inputs: Any, first: int, count: int, begin: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for a rank that has ``count`` experts from ``first`` on, which in its module begin with number
    ``begin``: those of others count nothing."""
    hidden, ids, weights = inputs
    elsewhere = (ids < first) | (ids >= first + count)
    return hidden, (ids - first + begin).masked_fill(elsewhere, begin), weights.masked_fill(elsewhere, 0)


class _AbsentExpert(Absent):
    """No token with a weight comes here; a loop over all experts may come with none."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def _take_of_list(experts: Any, first: int, count: int) -> None:
    for index in range(len(experts)):
        if not first <= index < first + count:
            experts._modules[str(index)] = _AbsentExpert(ANOTHER_EXPERT)


def _take(module: Any, first: int, count: int, total: int) -> None:
    """Leave this rank's experts in the module; values are for the loader."""
    shards = dict(getattr(module, "shards", {}))
    for key, old in module._parameters.items():
        if old is not None:
            module._parameters[key] = parameter((count, *old.shape[1:]), old.dtype)
            shards[key] = Shard(0, first, count, total=total)
    module.shards = shards
    for key, value in list(vars(module).items()):
        if value == total and isinstance(value, int) and "expert" in key:
            setattr(module, key, count)


def _keep_own(module: Any, group: Group, total: int) -> None:
    count = total // group.size
    first = group.rank * count
    if _is_list(module):
        _take_of_list(module, first, count)
        module.__dict__["forward"] = _masked(module, group, first, count, first)
    else:
        _take(module, first, count, total)
        module.__dict__["forward"] = _masked(module, group, first, count, 0)


def _masked(module: Any, group: Group, first: int, count: int, begin: int) -> Callable[..., torch.Tensor]:
    forward = type(module).forward
    signature = inspect.signature(forward)

    def masked(*args: Any, **kwargs: Any) -> torch.Tensor:
        inputs = signature.bind(module, *args, **kwargs).args[1:]
        return group.all_reduce(forward(module, *_own(inputs, first, count, begin)))

    return masked
