"""Run a model whose parameters are on meta: what is small and real (ids, positions, rotary tables) stays real.

Legend: T tokens of the probe, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from modelbay.errors import BackendError
from modelbay_transformers import masks

#: Tokens of the probe: not a size that any dimension of a model has.
TOKENS = 11
_POSITIONS = "_modelbay_positions"


@dataclass(frozen=True, slots=True)
class Seen:
    """``hidden``: the last hidden state [1, T, H] on meta. ``position_rows``: rows of the smallest table that is
    indexed by position, None if there is none."""

    hidden: torch.Tensor
    position_rows: int | None


def run_on_meta(base: nn.Module) -> Seen:
    """One forward.

    Raises:
        BackendError: the forward needs what is not there (pixels, a cache, values of hidden states).
    """
    accepted = accepted_arguments(base)
    ids = torch.arange(3, 3 + TOKENS)[None]
    positions = torch.arange(TOKENS)[None]
    setattr(positions, _POSITIONS, True)
    inputs = {"input_ids": ids, "position_ids": positions, **fixed_arguments(base)}
    if "position_ids" not in accepted:
        raise BackendError(
            f"{type(base).__name__}.forward takes no position_ids: tokens of several sequences cannot share a batch."
        )
    spread = _MetaSpreads()
    try:
        with torch.no_grad(), _experts_pass_through(base), spread:
            output = base(**{name: value for name, value in inputs.items() if name in accepted})
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(_cannot(base, error)) from error
    if not spread.positions_used:
        raise BackendError(
            f"{type(base).__name__} takes position_ids and does not use them: "
            "tokens of several sequences cannot share a batch."
        )
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        hidden = output[0]
    if not isinstance(hidden, torch.Tensor) or hidden.shape[:2] != (1, TOKENS):
        raise BackendError(f"{type(base).__name__} does not give one hidden state for each token ({shape_of(hidden)}).")
    return Seen(hidden, spread.position_rows)


def _cannot(base: nn.Module, error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    name = type(base).__name__
    if "meta tensors" in text or "meta tensor;" in text:
        return f"{name} decides by the values of its hidden states what to compute, so it cannot be probed without weights."
    return f"{name} cannot be run on token ids and positions alone: {type(error).__name__}: {text}"


def accepted_arguments(module: nn.Module) -> set[str]:
    """Names of forward's arguments; a ``**kwargs`` counts for those that Transformers' models pass along."""
    parameters = inspect.signature(module.forward).parameters
    passed_on = {"use_cache", "return_dict", "position_ids"}
    return set(parameters) | (passed_on if "kwargs" in parameters else set())


def fixed_arguments(module: nn.Module) -> dict[str, Any]:
    """What every forward of a base model gets besides its tokens, as far as it takes it."""
    accepted = accepted_arguments(module)
    return {name: value for name, value in {"use_cache": False, "return_dict": True}.items() if name in accepted}


def shape_of(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


class _MetaSpreads(TorchDispatchMode):
    """An operation with one operand on meta runs on meta as a whole; one with real operands runs for real.

    Follows two things on the way: whether positions ever meet hidden states, and views of a described mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.positions_used = False
        self.position_rows: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
        on_meta = any(item.device.type == "meta" for item in operands)
        positions = any(getattr(item, _POSITIONS, False) for item in operands)
        if on_meta:
            self.positions_used |= positions
            if positions and func is torch.ops.aten.embedding.default:
                rows = args[0].shape[0]
                self.position_rows = min(rows, self.position_rows or rows)
            args, kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
        output = func(*args, **kwargs)
        made = [item for item in tree_flatten(output)[0] if isinstance(item, torch.Tensor)]
        for item in made:
            if positions and item.device.type != "meta":
                setattr(item, _POSITIONS, True)
            if len(operands) == 1 and item.shape[-1:] == operands[0].shape[-1:] and item.dtype == operands[0].dtype:
                self._keep_origin(operands[0], item)
        return output

    @staticmethod
    def _keep_origin(before: torch.Tensor, after: torch.Tensor) -> None:
        if masks.origin(before) is not None:
            masks.remember(after, masks.origin(before))


def _to_meta(item: torch.Tensor) -> torch.Tensor:
    return item if item.device.type == "meta" else item.to("meta")


@contextmanager
def _experts_pass_through(base: nn.Module) -> Iterator[None]:
    """Experts route by value, and on meta there are none: for the probe they hand their input on."""
    replaced = []
    for module in base.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module):
            replaced.append(experts)
            experts.__dict__["forward"] = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for experts in replaced:
            experts.__dict__.pop("forward", None)


@contextmanager
def attention_named(base: nn.Module, name: str) -> Iterator[None]:
    """Every config in ``base`` asks for the attention ``name``, for a while."""
    configs = {id(m.config): m.config for m in base.modules() if hasattr(getattr(m, "config", None), "model_type")}
    before = [(config, config._attn_implementation_internal) for config in _with_inner(configs)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


def _with_inner(configs: dict[int, Any]) -> list[Any]:
    found = dict(configs)
    for config in configs.values():
        for name in getattr(type(config), "sub_configs", ()):
            inner = getattr(config, name, None)
            if hasattr(inner, "_attn_implementation_internal"):
                found[id(inner)] = inner
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


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
