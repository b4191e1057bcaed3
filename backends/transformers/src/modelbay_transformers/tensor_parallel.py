"""Divide a Transformers model over the ranks that share its layers (BEHAVIOUR X5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay.trace import Trace
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.moe import Experts
from modelbay_transformers.division import COLWISE
from modelbay_transformers.probe import AttentionFacts
from modelbay_transformers.shares import NotShared
from modelbay_transformers.simulate import Failed
from modelbay_transformers.sliced import SlicedLinear, split_parameter
from modelbay_transformers.tensor_plan import TensorPlan, plan_tensors, say_tensor_plan


def plan_ranks(
    build: BuildContext,
    base: nn.Module,
    config: Any,
    attention: Sequence[AttentionFacts],
    linears: Mapping[str, Sequence[Any]],
    blocks: set[str],
    trace: Trace,
) -> TensorPlan | None:
    """How ``base`` is divided over the ranks of ``build``; None for one rank.

    Args:
        blocks: modules that are the runtime's, and divide themselves.

    Raises:
        BackendError: nothing could be divided, or it is not known how a rank's part would be computed.
    """
    size = build.parallel.tp.size
    if size == 1:
        return None
    try:
        plan = plan_tensors(base, config, size, attention, linears, blocks)
    except (NotShared, Failed) as error:
        raise BackendError(f"{type(base).__name__} cannot be divided over {size} ranks: {error.reason}.") from error
    say_tensor_plan(trace, base, plan, [name for name in linears if not _within(name, blocks)])
    return plan


def _within(name: str, blocks: set[str]) -> bool:
    return name.startswith(tuple(f"{block}." for block in blocks))


def check_something_is_divided(base: nn.Module, build: BuildContext, blocks: bool, plan: TensorPlan | None) -> None:
    """Refuse a model of which every rank would hold all layers whole.

    Raises:
        BackendError: naming the model.
    """
    if plan is None or blocks or plan.divided or _divides_experts(base):
        return
    raise BackendError(
        f"tensor_parallel_size = {build.parallel.tp.size}: {type(base).__name__} has no tensor parallel plan "
        "(base_model_tp_plan of its config), and none could be inferred from its modules.",
        hint="Use pipeline_parallel_size or data_parallel_size.",
    )


def _divides_experts(base: nn.Module) -> bool:
    return any(
        name.rpartition(".")[2] == "experts" and "forward" in vars(m) for name, m in base.named_modules()
    ) or any(isinstance(m, Experts) for m in base.modules())


def apply_plan(build: BuildContext, base: nn.Module, plan: TensorPlan | None) -> None:
    """Split parameters and head counts; linears are for `slice_linears`."""
    if plan is None:
        return
    for name, dim in plan.division.parameters.items():
        split_parameter(build, base, name, dim)
    for name, values in plan.division.attributes.items():
        vars(base.get_submodule(name)).update(values)


def local_facts(facts: AttentionFacts, plan: TensorPlan | None) -> AttentionFacts:
    """The attention of one module with this rank's heads."""
    local = None if plan is None else plan.attention.get(facts.module)
    if local is None:
        return facts
    return dataclasses.replace(facts, num_heads=local.num_heads, num_kv_heads=local.num_kv_heads)


def is_sliced(plan: TensorPlan | None, name: str) -> bool:
    """Whether `slice_linears` has replaced the linear."""
    return plan is not None and name in plan.division.styles


def slice_linears(build: BuildContext, base: nn.Module, plan: TensorPlan | None, skip: tuple[str, ...]) -> int:
    """Replace the linears that the plan divides, but for those whose names begin like one of ``skip``; returns how
    many."""
    if plan is None:
        return 0
    division, count = plan.division, 0
    for name, style in division.styles.items():
        if name.startswith(skip):
            continue
        old: Any = base.get_submodule(name)
        own = dataclasses.replace(build, dtype=old.weight.dtype)
        new = SlicedLinear(
            own, old.in_features, old.out_features, bias=old.bias is not None, style=style,
            name=name.rpartition(".")[2], parts=division.parts.get(name), sections=division.sections.get(name, ()),
        )  # fmt: skip
        base.set_submodule(name, new)
        count += 1
    return count


def heads_of_group(plan: TensorPlan | None, group: Sequence[str]) -> dict[str, int] | None:
    """For siblings that are packed into one product: those with fewer parts than ranks; None if they cannot be packed,
    since not all of them are split by their outputs."""
    if plan is None:
        return {}
    division = plan.division
    if any(division.styles.get(name) != COLWISE or name in division.sections for name in group):
        return None
    return {name.rpartition(".")[2]: division.parts[name] for name in group if name in division.parts}
