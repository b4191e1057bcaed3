"""Run a model whose parameters are on meta: what is small and real (ids, positions, rotary tables) stays real.

Legend: T tokens of the probe, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError, one_line
from modelbay_transformers.positions import give_positions, numbering_places
from modelbay_transformers.spread import MetaSpreads, OwnNumbering, mark_given, mark_hidden

#: Tokens of the probe: not a size that any dimension of a model has.
TOKENS = 11
#: What the errors of operations say that would need values which are not there.
_NEEDS_VALUES = ("meta tensor", "register_meta", "unallocated storage")
#: In the place of values that are not there: parameters, and what stand-ins give.
SMALL = 0.01


@dataclass(frozen=True, slots=True)
class Seen:
    """``hidden``: the last hidden state [1, T, H] on meta. ``position_rows``: rows of the smallest table that is
    indexed by position, None if there is none. ``positions_used``: whether positions ever met hidden states.
    ``ran``: the modules whose forward ran; ``made``: what those gave that gave one tensor; ``spread``: what was
    followed."""

    hidden: torch.Tensor
    position_rows: int | None
    positions_used: bool
    ran: frozenset[nn.Module]
    made: list[tuple[torch.Tensor, nn.Module]]
    spread: MetaSpreads

    def maker(self, tensor: torch.Tensor) -> nn.Module | None:
        """The module whose output this is."""
        return next((module for output, module in self.made if output is tensor), None)


class NeedsValues(Exception):
    """The model's code asks for values that are not there."""


def run_on_meta(
    base: nn.Module, tokens: int = TOKENS, *, values: bool = False, first: int = 0, stride: int = 1
) -> Seen:
    """One forward over ``tokens`` tokens.

    Args:
        first, stride: the position of the first token, and from each to the next.
        values: parameters are all one small number instead of none.

    Raises:
        OwnNumbering, NeedsValues: it must be run again, with positions on that line, or with values.
        BackendError: the forward needs what is not there (pixels, a cache), or it mixes tokens outside of attention.
    """
    try:
        with one_number(base) if values else nullcontext():
            return _run(base, tokens, first, stride)
    except (BackendError, OwnNumbering):
        raise
    except Exception as error:
        if any(sign in str(error) for sign in _NEEDS_VALUES):
            raise NeedsValues from error
        text = f"{type(error).__name__}: {one_line(error)[:200]}"
        raise BackendError(f"{type(base).__name__} cannot be run on token ids and positions alone: {text}") from error


def _run(base: nn.Module, tokens: int, first: int, stride: int) -> Seen:
    accepted = accepted_arguments(base)
    ids = torch.arange(3, 3 + tokens)[None]
    positions = mark_given(torch.arange(first, first + tokens * stride, stride)[None])
    inputs = {"input_ids": ids, **give_positions(base, positions), **fixed_arguments(base)}
    where = _Where(base)
    spread = MetaSpreads(tokens, where.name, positions, numbering_places(base), guard=tokens == TOKENS)
    with torch.no_grad(), _as_it_was(base), _experts_pass_through(base), where, spread:
        output = base(**{name: value for name, value in inputs.items() if name in accepted})
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        hidden = output[0]
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, tokens):
        raise BackendError(f"{type(base).__name__} does not give one hidden state for each token ({shape_of(hidden)}).")
    return Seen(hidden, spread.position_rows, spread.positions_used, frozenset(where.ran), where.made, spread)


@contextmanager
def _as_it_was(base: nn.Module) -> Iterator[None]:
    """Buffers and other tensors that a forward replaces are put back."""
    kept = [(module, dict(module._buffers), _tensors_of(module)) for module in base.modules()]
    try:
        yield
    finally:
        for module, buffers, attributes in kept:
            module._buffers.update(buffers)
            module.__dict__.update(attributes)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


@contextmanager
def one_number(base: nn.Module) -> Iterator[None]:
    """Every parameter is one small number: values at hand, and no memory."""
    kept = [(module, dict(module._parameters)) for module in base.modules()]
    try:
        for module, parameters in kept:
            for name, parameter in parameters.items():
                if parameter is not None:
                    view = torch.full((), SMALL, dtype=parameter.dtype).expand(parameter.shape)
                    module._parameters[name] = mark_hidden(nn.Parameter(view, requires_grad=False))  # type: ignore[assignment]
        yield
    finally:
        for module, parameters in kept:
            module._parameters.update(parameters)


def accepted_arguments(module: nn.Module) -> set[str]:
    """Names of forward's arguments; a ``**kwargs`` counts for those that Transformers' models pass along."""
    parameters = inspect.signature(module.forward).parameters
    passed_on = {"input_ids", "inputs_embeds", "position_ids", "use_cache", "return_dict"}
    return set(parameters) | (passed_on if "kwargs" in parameters else set())


def fixed_arguments(module: nn.Module) -> dict[str, Any]:
    """What every forward of a base model gets besides its tokens, as far as it takes it."""
    accepted = accepted_arguments(module)
    return {name: value for name, value in {"use_cache": False, "return_dict": True}.items() if name in accepted}


def shape_of(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@contextmanager
def _experts_pass_through(base: nn.Module) -> Iterator[None]:
    """Experts route by value, and on meta there are none: for the probe they hand their input on."""
    replaced: list[tuple[nn.Module, Any]] = []
    for module in base.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            replaced.append((experts, experts.__dict__.get("forward")))
            experts.__dict__["forward"] = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for experts, forward in reversed(replaced):
            experts.__dict__.pop("forward", None)
            if forward is not None:
                experts.__dict__["forward"] = forward


def name_attention(base: nn.Module, name: str) -> None:
    """Every config in ``base`` asks for the attention ``name``."""
    for config in configs_of(base):
        config._attn_implementation_internal = name


@contextmanager
def attention_named(base: nn.Module, name: str) -> Iterator[None]:
    """The same for a while."""
    with attention_of(configs_of(base), name):
        yield


@contextmanager
def attention_of(configs: Iterable[Any], name: str) -> Iterator[None]:
    """These configs ask for the attention ``name`` for a while."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


def configs_of(base: nn.Module) -> list[Any]:
    """The configs that say how the modules of ``base`` attend."""
    owned: list[Any] = [getattr(module, "config", None) for module in base.modules()]
    configs: dict[int, Any] = {id(config): config for config in owned if hasattr(config, "model_type")}
    found = dict(configs)
    for config in configs.values():
        for name in getattr(type(config), "sub_configs", ()):
            inner = getattr(config, name, None)
            if hasattr(inner, "_attn_implementation_internal"):
                found[id(inner)] = inner
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


class _Where:
    """Which module is computing: for errors."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.ran: set[nn.Module] = set()
        self.made: list[tuple[torch.Tensor, nn.Module]] = []
        self._stack: list[str] = [type(base).__name__]
        self._hooks: list[Any] = []

    def name(self) -> str:
        return self._stack[-1]

    def __enter__(self) -> _Where:
        for name, module in self.base.named_modules():
            if name:
                self._hooks.append(module.register_forward_pre_hook(self._push(name)))
                self._hooks.append(module.register_forward_hook(self._pop))
        return self

    def _push(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.ran.add(module)
            self._stack.append(f"{name} ({type(module).__name__})")

        return hook

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        if isinstance(output, torch.Tensor):
            self.made.append((output, module))

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()


class LinearWatch:
    """Which linears are called through their forward, and which are given the very same tensor."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.inputs: dict[str, list[int]] = {}
        self._kept: list[torch.Tensor] = []  # an id is only an identity while its object lives
        self._hooks: list[Any] = []

    def __enter__(self) -> LinearWatch:
        for name, module in self.base.named_modules():
            if type(module) is nn.Linear:
                self._hooks.append(module.register_forward_pre_hook(self._record(name)))
        return self

    def _record(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor):
                self._kept.append(args[0])
                self.inputs.setdefault(name, []).append(id(args[0]))

        return hook

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()
