"""A model's own experts module with one rank's experts in it.

What a token's other experts give is weighed with zero here, and the sum over ranks is taken. That parts of the module
sum up to the whole is tried before.

Legend: E experts, H hidden size, k experts per token, T tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from modelbay.weights.matching import ANOTHER_EXPERT
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.linear import parameter
from modelbay_runtime.layout import Shard
from modelbay_runtime.parallel.groups import Group
from modelbay_transformers.expert_trials import EXPERTS, same, tiny_copy, tiny_inputs

#: A list of experts is tried in float32 as it is, up to this many parameters.
_LARGEST = 100_000_000


def splits(module: Any, count: int, hidden_size: int) -> bool:
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


def keep_own(module: Any, group: Group, total: int) -> None:
    """Leave this rank's experts in ``module``; its forward gives the sum over the ranks of ``group``.

    Args:
        total: E.
    """
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
