"""One stage of a pipeline (BEHAVIOUR X6): the layers of other stages are left out of Transformers' own code.

The base model's forward runs on every stage as it is. A layer that an earlier stage has hands on what it is given, the
last of them what that stage sent; the first layer of a later stage ends the forward. So whatever the forward does
between embedding and layers, or behind them, it does on the stage that it is meant for, and every layer keeps its place
in the list and its number.

That this is all that one layer gets from another is read off a run on meta (`modelbay_transformers.stage_watch`): each
layer is given the very tensor that the one before it gave, and on a later stage nothing that reaches a layer comes from
token ids or from what was left out.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from modelbay.errors import BackendError, ConfigError
from modelbay.plans import Stage, check_pp_plan, place_children, split_stages
from modelbay.resolve import Resolution
from modelbay.trace import Trace
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers.base_output import BaseOutput
from modelbay_transformers.probe import ProbeResult
from modelbay_transformers.probe_run import SMALL, TOKENS
from modelbay_transformers.stage_watch import LayerCall, check_independence, check_runs_in_part, watch_layers
from modelbay_transformers.surgery import held_besides, module_name, token_table


class _Stop(Exception):
    """The forward is done on this stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(slots=True)
class PipelineStage:
    """``received``: [1, T, H] from the stage before, set before each forward; None on the first stage."""

    is_first: bool
    device: torch.device
    received: torch.Tensor | None = None


def enter_stage(
    parallel: ParallelContext,
    device: torch.device,
    outer: Any,
    base: Any,
    prefix: str,
    config: Any,
    found: ProbeResult,
    resolution: Resolution,
) -> PipelineStage | None:
    """Leave out of ``base`` what other stages hold; of ``found``, what is left stays. None if there is one stage.

    Raises:
        BackendError: the model cannot be run in stages, with the reason.
    """
    if parallel.mesh.pp == 1:
        return None
    if "." in prefix:
        raise BackendError(
            f"pipeline_parallel_size = {parallel.mesh.pp}: {type(outer).__name__} reads more than text, and is not run "
            "in stages."
        )
    places = _places(config, base)
    embedding = token_table(outer, base)
    shared = held_besides(outer, getattr(embedding, "weight", None), embedding)
    keep = embedding if shared or (not prefix and resolution.config.tie_word_embeddings) else None
    names = [facts.name for facts in found.attention]
    stage = build_stage(base, places, parallel, resolution.config.hidden_size, device, names, keep, resolution.trace)
    left = {name for name, _ in base.named_modules()}
    found.attention = [facts for facts in found.attention if facts.name in left]
    found.linears = {name: inputs for name, inputs in found.linears.items() if name in left}
    return stage


def _places(config: Any, base: nn.Module) -> dict[str, Stage] | None:
    """What the pipeline plan of the config says, if it has one that fits."""
    plan = getattr(config, "base_model_pp_plan", None)
    children = {name: isinstance(child, nn.ModuleList) for name, child in base.named_children()}
    if not plan:
        return None
    try:
        check_pp_plan(plan, children, "base_model_pp_plan")
    except ConfigError:
        return None  # refused before, where it was written for this very model
    return place_children(plan, children)


def leave_out_head(outer: nn.Module, base: nn.Module, prefix: str, parallel: ParallelContext) -> None:
    """On a stage that is not the last: nothing around the base model."""
    embedding = token_table(outer, base)
    weight, embedding_name = getattr(embedding, "weight", None), module_name(outer, embedding)
    for name, child in list(outer.named_children()):
        if name == prefix:
            continue
        tied = weight is not None and getattr(child, "weight", None) is weight and parallel.is_first_stage
        outer._modules[name] = Absent(ANOTHER_STAGE, f"{embedding_name}.weight" if tied and embedding_name else None)


def build_stage(
    base: nn.Module,
    places: Mapping[str, Stage] | None,
    parallel: ParallelContext,
    hidden_size: int,
    device: torch.device,
    attending: Sequence[str],
    keep: nn.Module | None,
    trace: Trace,
) -> PipelineStage:
    """Leave out of ``base`` what other stages hold.

    Args:
        places: on which stages each direct child is, by the plan; None if there is no plan.
        attending: names of the attention modules.
        keep: an embedding whose weight is also that of a head.

    Raises:
        BackendError: the model cannot be run in stages, with the reason.
    """
    name = _list_of_layers(base, places, attending)
    layers: Any = base.get_submodule(name)
    own = split_stages(len(layers), parallel.mesh.pp)[parallel.place.pp_rank]
    seen = watch_layers(base, name, hidden_size)
    stage = PipelineStage(parallel.is_first_stage, device)
    tables = dict(base.named_modules())
    for index, layer in enumerate(layers):
        if index not in own:
            _leave_out(layer, f"{name}.{index}", stage, seen.calls[index], index, own)
    absent = []
    if not parallel.is_first_stage:
        for child in _only(base, name, seen.before - seen.after - seen.within, places, "first"):
            if child in seen.outputs:
                _give_zeros(tables[child], seen.outputs[child], device, keep if parallel.is_last_stage else None)
                absent.append(child)
    if not parallel.is_last_stage:
        for child in _only(base, name, seen.after - seen.before - seen.within, places, "last"):
            _empty(tables[child], device)
            absent.append(child)
        _end_early(base)
    left_out = [layer for index, layer in enumerate(layers) if index not in own]
    if parallel.is_first_stage:
        check_runs_in_part(base, left_out)
    else:
        check_independence(base, [layers[index] for index in own], [tables[child] for child in absent], left_out)
    source = "inferred: the list of layers that attend" if places is None else "plan"
    trace.decide("plan", "stage", f"{name} {own.start} to {own.stop - 1} of {len(layers)}", source)
    trace.decide("plan", "on other stages", ", ".join(absent) or "nothing besides layers", source)
    return stage


def _list_of_layers(base: nn.Module, places: Mapping[str, Stage] | None, attending: Sequence[str]) -> str:
    if places is not None:
        return next(name for name, place in places.items() if place == "split")
    found = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and any(inner.startswith(f"{name}.") for inner in attending)
    ]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outer) != 1:
        raise BackendError(
            f"{type(base).__name__} has no pipeline plan, and {len(outer)} lists of layers"
            f"{': ' + ', '.join(outer) if outer else ''}; one is needed to split it into stages."
        )
    return outer[0]


def _only(base: nn.Module, layers: str, paths: set[str], places: Mapping[str, Stage] | None, place: Stage) -> list[str]:
    """The outermost of ``paths`` that have parameters and do not hold the layers; by a plan, those that it names."""
    holds = {layers[:at] for at in range(len(layers) + 1) if at == len(layers) or layers[at] == "."}
    found: list[str] = []
    for path in sorted(paths, key=lambda path: path.count(".")):
        child = path.partition(".")[0]
        if places is not None and (path != child or places.get(child) != place):
            continue
        module = base.get_submodule(path)
        if path in holds or any(path.startswith(f"{other}.") for other in found):
            continue
        if any(True for _ in module.parameters()):
            found.append(path)
    return found


def _empty(module: nn.Module, device: torch.device, keep: nn.Module | None = None) -> None:
    """Nothing of it is on this rank, but for ``keep``; what the model's code reads of its attributes stays."""
    held = keep is not None and any(inner is keep for inner in module.modules())
    for inner in list(module.modules()):
        if inner is keep:
            continue
        if held and inner._parameters:
            inner.held_elsewhere = ANOTHER_STAGE  # type: ignore[assignment]
        # Code may ask a weight for its device.
        nothing = {
            key: torch.empty(0, dtype=p.dtype, device=device) for key, p in inner._parameters.items() if p is not None
        }
        inner._parameters.clear()
        inner._buffers.clear()
        inner.__dict__.update(nothing)
    if not held:
        module.held_elsewhere = ANOTHER_STAGE  # type: ignore[assignment]


def _leave_out(layer: nn.Module, name: str, stage: PipelineStage, call: LayerCall, index: int, own: range) -> None:
    _empty(layer, stage.device)
    layer._modules.clear()
    takes_over, ends = index == own.start - 1, index == own.stop

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[call.key] if isinstance(call.key, int) else kwargs[call.key]
        if ends:
            raise _Stop(hidden)
        if takes_over:
            hidden = stage.received if stage.received is not None else _nothing_received(hidden)
        return hidden if call.rest is None else (hidden, *call.rest)

    layer.__dict__["forward"] = forward


def _nothing_received(hidden: torch.Tensor) -> torch.Tensor:
    """While the model is looked at, no stage has sent anything: hidden states from nowhere."""
    return torch.full(hidden.shape, SMALL, dtype=hidden.dtype, device=hidden.device)


def _give_zeros(module: nn.Module, output: torch.Tensor, device: torch.device, keep: nn.Module | None) -> None:
    """In the place of what only the first stage computes: zeros, in the shape that it would have.

    Args:
        keep: what in it has parameters that are on this rank all the same.
    """
    shape, dtype = tuple(output.shape), output.dtype
    _empty(module, device, keep)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        first = next(item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor))
        tokens = first.shape[1] if first.dim() > 1 else first.shape[0]
        return torch.zeros([tokens if size == TOKENS else size for size in shape], dtype=dtype, device=first.device)

    module.__dict__["forward"] = forward


def _end_early(base: nn.Module) -> None:
    forward = base.forward

    @functools.wraps(forward)
    def ending(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _Stop as stop:
            return BaseOutput(stop.hidden)

    base.__dict__["forward"] = ending
