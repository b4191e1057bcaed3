"""How many dimensions of a head turn with the position: seen in the keys that a model's own attention makes.

One more run, with one real number for all parameters and linears that multiply nothing: they give numbers of no
meaning, the same for every token. Whatever differs then from token to token was turned. Keys are looked at and not
queries, which some models scale by position.

Legend: K kv heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.probe_run import TOKENS, NeedsValues, run_on_meta
from modelbay_transformers.spread import mark_hidden

#: Tokens of this run: not the probe's number, by whose size it is seen that tokens are mixed.
_TOKENS = TOKENS + 2
#: The slowest dimensions turn by less than a number in float32 tells within a short sequence: so positions lie far
#: apart, however short what will be served is.
_FAR = 1 << 20


class _Enough(BaseException):
    """Every layer that is asked for was seen. No Exception: none of the model's handlers is meant."""


def turning_dimensions(base: nn.Module, kinds: Mapping[nn.Module, str], longest: int) -> dict[str, int]:
    """Of each kind of layer, how many of a key's D dimensions depend on the position, in the first layer of which any
    does; 0 where none does. A kind whose keys are not made by linears is absent.

    Args:
        kinds: attention module -> its kind.
        longest: the longest sequence that will be served, in tokens. Positions of the run are spread over it where
            the model has none beyond.
    """
    return _look(base, kinds, max(longest, _FAR)) or _look(base, kinds, longest)


def _look(base: nn.Module, kinds: Mapping[nn.Module, str], longest: int) -> dict[str, int]:
    found: dict[str, int] = {}

    def look(module: nn.Module, q: Any, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: Any) -> torch.Tensor:
        if k.device.type != "meta" and module in kinds:
            kind = kinds[module]
            found[kind] = found.get(kind) or _turning(k)
            if all(found.get(other) for other in kinds.values()):
                raise _Enough
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    stride = max(1, (longest - 1) // (_TOKENS - 1))
    try:
        with dispatch.attending(base, look), _real_numbers(base, kinds):
            run_on_meta(base, _TOKENS, stride=stride)
    except _Enough:
        pass
    except (BackendError, NeedsValues):  # it was not written for such numbers: nothing is known
        return {}
    return found


def _turning(keys: torch.Tensor) -> int:
    """keys: [1, K, T, D]."""
    return int((keys != keys[:, :, :1]).flatten(0, 2).any(0).sum())


@contextmanager
def _real_numbers(base: nn.Module, attention: Iterable[nn.Module]) -> Iterator[None]:
    """Linears give numbers of no meaning, and every parameter is one (a view: no memory), in float32."""
    modules = list(base.modules())
    inside = {part for module in attention for part in module.modules()}
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    # A subclass may give something else (a router); what an attention has of them, its keys are made of.
    linears = [module for module in linears if module in inside or type(module).forward is nn.Linear.forward]
    forwards = [(module, module.__dict__.get("forward")) for module in linears]
    parameters = [(module, dict(module._parameters)) for module in modules]
    generator = torch.Generator().manual_seed(0)
    try:
        for linear, _ in forwards:
            linear.__dict__["forward"] = _giving(torch.rand(linear.out_features, generator=generator) + 0.5)
        for module, own in parameters:
            for name, parameter in own.items():
                if parameter is not None:
                    ones = nn.Parameter(torch.ones(()).expand(parameter.shape), requires_grad=False)
                    module._parameters[name] = mark_hidden(ones)  # type: ignore[assignment]
        yield
    finally:
        for linear, forward in forwards:
            linear.__dict__.pop("forward", None)
            if forward is not None:
                linear.__dict__["forward"] = forward
        for module, own in parameters:
            module._parameters.update(own)


def _giving(values: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A linear's forward that gives [..., out] the same values for every token."""
    return lambda x, *args, **kwargs: values.expand(*x.shape[:-1], len(values)).clone()
