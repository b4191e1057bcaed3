"""What one layer gets from another, read off a run on meta: whether a model can be run in stages.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.probe_run import TOKENS, NeedsValues, run_on_meta

_FOREIGN = "_modelbay_foreign"
#: Where an argument stands: its place, or its name.
Key = int | str


@dataclass(slots=True)
class LayerCall:
    """How a layer is called: where its hidden states are among its arguments, and what it returns besides them."""

    key: Key
    rest: tuple[Any, ...] | None


@dataclass(slots=True)
class SeenRun:
    """One run of the whole model. ``outputs``: of modules that gave one tensor, the last one's shape and dtype."""

    calls: list[LayerCall] = field(default_factory=list)
    before: set[str] = field(default_factory=set)
    after: set[str] = field(default_factory=set)
    within: set[str] = field(default_factory=set)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


def watch_layers(base: nn.Module, name: str, hidden_size: int) -> SeenRun:
    """Run the whole model and see how its layers are called.

    Raises:
        BackendError: they do not simply follow one another.
    """
    layers: Any = base.get_submodule(name)
    numbers = {layer: index for index, layer in enumerate(layers)}
    if len(numbers) != len(layers):
        raise BackendError(f"{name} of {type(base).__name__} has the same layer in several places: no stages.")
    seen = SeenRun()
    inner = {module for layer in layers for module in layer.modules()}
    state: dict[str, Any] = {"last": None}
    hooks: list[Any] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        _check_order(base, name, numbers[module], seen)
        last = state["last"] if seen.calls else None
        seen.calls.append(_read_call(base, f"{name}.{numbers[module]}", args, kwargs, last, hidden_size))

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        state["last"], rest = _read_output(f"{name}.{numbers[module]}", output)
        seen.calls[-1].rest = rest

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            done = len(seen.calls)
            place = seen.before if not done else seen.after if done == len(layers) else seen.within
            place.add(path)
            if isinstance(output, torch.Tensor):
                seen.outputs[path] = output.detach()

        return hook

    try:
        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(layer.register_forward_hook(leave, with_kwargs=True))
        for path, module in base.named_modules():
            if path and module not in inner:
                hooks.append(module.register_forward_hook(note(path)))
        _run(base, seen)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen.calls) != len(layers):
        raise BackendError(f"{type(base).__name__} runs {len(seen.calls)} of {len(layers)} {name}: no stages.")
    return seen


def _run(base: nn.Module, seen: SeenRun | None = None) -> torch.Tensor:
    try:
        with dispatch.attending(base, dispatch.blank):
            return run_on_meta(base).hidden
    except NeedsValues:
        if seen is not None:
            for entries in (seen.calls, seen.before, seen.after, seen.within, seen.outputs):
                entries.clear()
        with dispatch.attending(base, dispatch.blank):
            return run_on_meta(base, values=True).hidden


def _check_order(base: nn.Module, name: str, number: int, seen: SeenRun) -> None:
    if number != len(seen.calls):
        raise BackendError(f"{type(base).__name__} does not run its {name} one after another: no stages.")


def _read_call(
    base: nn.Module, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], last: Any, hidden_size: int
) -> LayerCall:
    given: dict[Key, Any] = dict(enumerate(args))
    given.update(kwargs)
    if last is None:
        keys = [key for key, value in given.items() if _is_hidden(value, hidden_size)]
        if len(keys) != 1:
            raise BackendError(
                f"{name} of {type(base).__name__} is given {len(keys)} tensors of hidden states; a stage hands on one."
            )
        return LayerCall(keys[0], None)
    keys = [key for key, value in given.items() if value is last]
    if not keys:
        raise BackendError(
            f"{name} of {type(base).__name__} is not given what the layer before it gives: "
            "what happens in between is not known to a stage."
        )
    return LayerCall(keys[0], None)


def _is_hidden(value: Any, hidden_size: int) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and tuple(value.shape) == (1, TOKENS, hidden_size)
    )


def _read_output(name: str, output: Any) -> tuple[torch.Tensor, tuple[Any, ...] | None]:
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        rest = tuple(None if isinstance(item, torch.Tensor) else item for item in output[1:])
        return output[0], rest
    raise BackendError(f"{name} gives {type(output).__name__}, not hidden states: no stages.")


def check_runs_in_part(base: nn.Module, left_out: Sequence[nn.Module]) -> torch.Tensor:
    """Run what is left, which ran when it was whole: what it gives.

    Raises:
        BackendError: its code reads more of a layer that was left out than that layer's attributes.
    """
    try:
        return _run(base)
    except BackendError as error:
        cause, name = error.__cause__, type(base).__name__
        if cause is None:  # said by whoever watches, not raised by the model's code
            raise
        if isinstance(cause, AttributeError) and any(cause.obj is layer for layer in left_out):
            raise BackendError(
                f"{name} looks inside its layers ({type(cause.obj).__name__}.{cause.name}) to compute something else, "
                "so none of them can be left out: no stages."
            ) from error
        raise BackendError(
            f"{name} does not run without what other stages hold, though it does as a whole: no stages "
            f"({error.message})."
        ) from error


def check_independence(
    base: nn.Module, own: Sequence[nn.Module], absent: Sequence[nn.Module], left_out: Sequence[nn.Module]
) -> None:
    """Nothing that reaches this stage's layers, or comes out, is made of token ids or of what was left out.

    Args:
        own, left_out: this stage's layers and all others.
        absent: other modules that are not on this stage.

    Raises:
        BackendError: something is.
    """
    names = {module: name for name, module in base.named_modules()}

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(_is_foreign(item) for item in tree_flatten((args, kwargs))[0]):
            raise BackendError(
                f"{names[module]} of {type(base).__name__} needs more than the hidden states of the layer before it "
                "(token ids, or what is computed on the first stage): no stages."
            )

    def mark_ids(module: nn.Module, args: Any, kwargs: Any) -> None:
        for item in tree_flatten((args, {k: v for k, v in kwargs.items() if k != "position_ids"}))[0]:
            _mark(item)

    def mark_output(module: nn.Module, args: Any, output: Any) -> None:
        _mark(output)

    hooks = [layer.register_forward_pre_hook(check, with_kwargs=True) for layer in own]
    hooks.append(base.register_forward_pre_hook(mark_ids, with_kwargs=True))
    hooks += [module.register_forward_hook(mark_output) for module in absent]
    try:
        with _Follow():
            hidden = check_runs_in_part(base, left_out)
    finally:
        for hook in hooks:
            hook.remove()
    if _is_foreign(hidden):
        raise BackendError(
            f"{type(base).__name__} adds something of the first stage to what its layers give: no stages."
        )


def _mark(item: Any) -> None:
    if isinstance(item, torch.Tensor):
        setattr(item, _FOREIGN, True)


def _is_foreign(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and getattr(item, _FOREIGN, False)


class _Follow(TorchDispatchMode):
    """What is made of something foreign is foreign."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.overloadpacket not in _WITHOUT_VALUES and any(map(_is_foreign, tree_flatten((args, kwargs))[0])):
            for item in tree_flatten(output)[0]:
                _mark(item)
        return output


_aten = torch.ops.aten
_WITHOUT_VALUES = {
    _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.zeros_like, _aten.ones_like,
    _aten.full_like, _aten.empty_like,
}  # fmt: skip
