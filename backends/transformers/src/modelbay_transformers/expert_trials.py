"""Tiny copies of a model's experts, with numbers in them: to try what may stand in their place.

What an experts module computes does not depend on its sizes, so it is tried with small ones.
Legend: E experts, H hidden size, I intermediate size, k experts per token, T tokens.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

EXPERTS, TOKENS = 4, 9
_SMALL = (8, 12, 20, 28, 36, 44, 52)
_TOLERANCE = 1e-4
_LARGE = 50.0

#: (hidden states [T, H], experts' numbers [T, k], their weights [T, k])
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def takes_routing(experts: nn.Module) -> bool:
    """Whether forward takes tokens, the experts of each, and their weights, and nothing else that it needs."""
    parameters = list(inspect.signature(type(experts).forward).parameters.values())[1:]
    needed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(needed) == 3 and not any(p.kind is p.KEYWORD_ONLY for p in parameters)


def tiny_copy(experts: Any, count: int, hidden_size: int) -> tuple[Any, int] | None:
    """A copy with `EXPERTS` experts and every other size small, float32, random, and its hidden size; None if its sizes
    cannot be told apart.

    Args:
        count: E of ``experts``.
    """
    parameters = {name: p for name, p in experts._parameters.items() if p is not None}
    sizes = sorted({size for p in parameters.values() for size in p.shape[1:]} | {hidden_size})
    small = _small_sizes(sizes)
    if small is None:
        return None
    tiny = copy.copy(experts)
    tiny.__dict__ = dict(experts.__dict__)
    generator = torch.Generator().manual_seed(0)
    tiny._parameters = {
        name: nn.Parameter(_random((EXPERTS, *(small[size] for size in p.shape[1:])), generator), requires_grad=False)
        for name, p in parameters.items()
    }
    for key, value in list(vars(tiny).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            if value == count and ("expert" in key or count not in small):
                tiny.__dict__[key] = EXPERTS
            elif value in small:
                tiny.__dict__[key] = small[value]
    return tiny, small[hidden_size]


def _small_sizes(sizes: list[int]) -> dict[int, int] | None:
    """Each size made small, halves of a size halves of what it becomes."""
    small: dict[int, int] = {}
    free = list(_SMALL)
    for size in sizes:
        half = size // 2 if size % 2 == 0 else None
        if half in small:
            small[size] = 2 * small[half]
        elif free:
            small[size] = free.pop(0)
        else:
            return None
    return small if len(set(small.values())) == len(small) else None


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * (0.5 if len(shape) < 3 else shape[-1] ** -0.5)


def tiny_inputs(hidden_size: int, count: int = EXPERTS) -> Inputs:
    """Tokens that go to two experts each; every other one is large, so that a limit on what is computed shows."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, hidden_size, generator=generator)
    hidden[::2] *= _LARGE
    ids = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(TOKENS)])
    return hidden, ids, torch.rand(TOKENS, 2, generator=generator) + 0.1


def same(found: Any, expected: Any) -> bool:
    """Whether the two give every token the same, as far as float32 goes."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor) or found.shape != expected.shape:
        return False
    scale = expected.abs().amax(-1).clamp(min=1e-3)
    return bool(((found - expected).abs().amax(-1) <= _TOLERANCE * scale).all())
