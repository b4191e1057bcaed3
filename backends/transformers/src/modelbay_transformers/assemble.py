"""From Transformers' classes to a module that follows the model contract: the order in which it is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelbay.errors import BackendError
from modelbay.resolve import Resolution
from modelbay.trace import Trace
from modelbay_runtime.api import BuildContext, KVSpec
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers import dispatch
from modelbay_transformers.agreement import check_agreement
from modelbay_transformers.attention import ServedAttention, StepHolder
from modelbay_transformers.backbones import keep_dtypes
from modelbay_transformers.classes import ModelClasses
from modelbay_transformers.conversion import Conversion, leave_out_pooler, read_conversion
from modelbay_transformers.expert_parallel import divide_experts
from modelbay_transformers.extent import check_extent
from modelbay_transformers.fuse import Fusion, fuse_layers, say_fusion
from modelbay_transformers.heads import PooledBy, PoolerWatch, TransformersForSequenceClassification, check_head
from modelbay_transformers.language import language_model_path, serve_attention
from modelbay_transformers.meta import build_on_meta
from modelbay_transformers.pack import pack_linears
from modelbay_transformers.plans import check_plans
from modelbay_transformers.positions import position_room
from modelbay_transformers.probe import ProbeResult, probe
from modelbay_transformers.rotary import fix_rotary
from modelbay_transformers.sliced import looked_up_table
from modelbay_transformers.stages import enter_stage
from modelbay_transformers.surgery import replace_linears
from modelbay_transformers.tensor_parallel import (
    apply_plan,
    check_something_is_divided,
    is_sliced,
    local_facts,
    plan_ranks,
    slice_linears,
)
from modelbay_transformers.tensor_plan import TensorPlan
from modelbay_transformers.trials import replace_norms
from modelbay_transformers.wrapping import Unwrapped, wrap

#: A plugin's own rules: is called with the outer model and its base model (the same where there is no class around it),
#: parameters on meta, before the probe.
Check = Callable[[nn.Module, nn.Module], None]


@torch.inference_mode(False)  # there, operations made of others are seen as one
def assemble(
    classes: ModelClasses, resolution: Resolution, build: BuildContext, *, check: Check | None = None
) -> nn.Module:
    """Build, probe, attach attention, replace linears, wrap.

    Raises:
        BackendError: the rule that the model breaks.
    """
    dispatch.register()
    model, conversion = _instance(classes, resolution, build)
    outer, base = model.outer, model.base
    if check is not None:
        check(outer, base)
    check_plans(classes.config, base, resolution.trace, strict=check is not None)
    fix_rotary(base, build.max_model_len, resolution.trace)
    found, pooled = _probed(model, resolution, build)
    room = position_room(base)
    stage = enter_stage(build.parallel, build.device, outer, base, model.prefix, classes.config, found, resolution)
    divide_experts(build, resolution.plugins, base, resolution.trace)
    table = looked_up_table(build, outer, base)
    holder = StepHolder()
    served = _serve_layers(model, found, holder, resolution, build)
    module = wrap(model, table, served.kv_specs, holder, resolution, build)
    module.max_positions, module.stage = room, stage
    if isinstance(module, TransformersForSequenceClassification):
        assert resolution.pooling is not None, "a classifier was resolved as one"
        module.set_up_head(pooled, found.hidden_size, resolution.pooling)
    conversion.attach(module)
    _say(resolution.trace, classes, module, found)
    served.say(resolution.trace)
    return module


def _instance(classes: ModelClasses, resolution: Resolution, build: BuildContext) -> tuple[Unwrapped, Conversion]:
    """The model on meta, and how its checkpoints are converted."""
    outer_class = classes.head or classes.base
    _check_class(outer_class)
    check_extent(classes.config)
    outer: Any = _build(outer_class, classes.config, build, None if classes.media else dispatch.ATTENTION)
    hidden_only = classes.head is None and resolution.task != "generate"
    if hidden_only:
        leave_out_pooler(outer)
    conversion = read_conversion(outer, base_only=hidden_only)
    prefix = _prefix(outer, classes)
    base = outer.get_submodule(prefix) if prefix else outer
    if classes.media and (backbones := resolution.config.backbone_dtypes):
        kept = keep_dtypes(outer, base, {path: getattr(torch, name) for path, name in backbones.items()})
        source = f"backbone, by {resolution.trace.argument('dtype')}"
        resolution.trace.decide("build", "towers in their own dtype", kept, source)
    return Unwrapped(classes, outer, base, prefix), conversion


def _probed(model: Unwrapped, resolution: Resolution, build: BuildContext) -> tuple[ProbeResult, PooledBy | None]:
    """What the probe saw, and how the base model makes its ``pooler_output``.

    Raises:
        BackendError: the model cannot be served, or not for this task.
    """
    with PoolerWatch(model.base) as pooler:
        found = probe(model.base, layer_count=resolution.config.num_layers, longest=build.max_model_len)
    _check_causality(found, resolution)
    check_agreement(model.base, found.attention, resolution.config, build.max_model_len, resolution.trace)
    spec = resolution.pooling
    if model.classes.head is not None and spec is not None and spec.num_labels is not None:
        check_head(model.outer, model.prefix, pooler.found, found.hidden_size, spec.num_labels)
    return found, pooler.found


@dataclass(frozen=True, slots=True)
class _Served:
    """What was done to the layers. ``linears``, ``norms``: how many were replaced; ``packed``: groups of linears that
    are one product."""

    kv_specs: dict[int, KVSpec]
    fusion: Fusion
    packed: list[tuple[str, ...]]
    linears: int
    norms: int

    def say(self, trace: Trace) -> None:
        """A decision for each kind of replacement."""
        trace.decide(
            "build", "linears", f"{self.linears} replaced by the runtime's", "probe: called through their forward"
        )
        say_fusion(trace, self.fusion)
        if self.packed:
            groups = sorted({"+".join(name.rpartition(".")[2] for name in group) for group in self.packed})
            trace.decide("build", "packed linears", groups, "probe: given the very same tensor")
        trace.decide("build", "norms", f"{self.norms} replaced by the runtime's kernel", "trial: same numbers")


def _serve_layers(
    model: Unwrapped, found: ProbeResult, holder: StepHolder, resolution: Resolution, build: BuildContext
) -> _Served:
    """Blocks, attention, linears and norms of the base model become the runtime's, each rank's part of them."""
    base, trace = model.base, resolution.trace
    fusion = fuse_layers(build, resolution.plugins, base, found.attention, holder)
    blocks = set(fusion.layers)
    plan = plan_ranks(build, base, model.classes.config, found.attention, found.linears, blocks, trace)
    check_something_is_divided(base, build, bool(blocks), plan)
    packed = [] if blocks else pack_linears(build, base, found.linears, plan)
    apply_plan(build, base, plan)
    kv_specs = _attach_attention(build, found, fusion, plan, holder)
    inside = tuple(f"{name}." for name in blocks) + tuple(name for group in packed for name in group)
    sliced = slice_linears(build, base, plan, inside)
    whole = dataclasses.replace(build, parallel=ParallelContext())
    rest = [name for name in found.linears if not name.startswith(inside) and not is_sliced(plan, name)]
    replaced = replace_linears(whole, base, rest)
    return _Served(kv_specs, fusion, packed, sliced + replaced, replace_norms(build, base))


def _attach_attention(
    build: BuildContext, found: ProbeResult, fusion: Fusion, plan: TensorPlan | None, holder: StepHolder
) -> dict[int, KVSpec]:
    """Let the runtime serve every attention module that no block stands for; what each layer keeps."""
    kv_specs = {block.attention.layer: block.attention.kv_spec for block in fusion.layers.values()}
    for facts in found.attention:
        if facts.name.rpartition(".")[0] not in fusion.layers:
            layer = ServedAttention(build, local_facts(facts, plan), holder)
            dispatch.attach(facts.module, layer)
            kv_specs[facts.layer] = layer.kv_spec
    return kv_specs


def _check_class(model_class: Any) -> None:
    if getattr(model_class, "_can_set_attn_implementation", None) is None:
        raise BackendError(f"{model_class.__name__} is no PreTrainedModel, so its attention cannot be set.")


def _build(model_class: Any, config: Any, build: BuildContext, attention: str | None) -> nn.Module:
    """The model on meta. A class whose own file attends in another way may still hold a language model that does not.

    Raises:
        BackendError: nothing in the model lets its attention be set.
    """
    settable = model_class._can_set_attn_implementation()
    try:
        model = build_on_meta(model_class, config, attention, build.dtype)
        holders: list[Any] = [m for m in model.modules() if hasattr(m, "_can_set_attn_implementation")]
        settable = settable or any(holder._can_set_attn_implementation() for holder in holders)
    except Exception:
        if settable:
            raise
    if not settable:
        raise BackendError(
            f"{model_class.__name__} does not let its attention be set (_can_set_attn_implementation() is False): "
            "it does not attend through ALL_ATTENTION_FUNCTIONS."
        )
    return model


def _prefix(outer: nn.Module, classes: ModelClasses) -> str:
    """The name of the base model in a class with a head; empty where there is no class around it."""
    if classes.head is None:
        return ""
    if classes.media:
        path = language_model_path(outer)
        serve_attention(outer, path)
        return path
    prefix = getattr(outer, "base_model_prefix", "")
    if prefix in outer._modules:
        return prefix
    children = [name for name, child in outer.named_children() if hasattr(child, "config_class")]
    if len(children) == 1:
        return children[0]
    raise BackendError(f"{type(outer).__name__} has no base model under its base_model_prefix ({prefix!r}).")


def _check_causality(found: ProbeResult, resolution: Resolution) -> None:
    causal = found.attention[0].causal
    if resolution.task == "generate" and not causal:
        raise BackendError(
            f"{resolution.architecture} attends both ways (is_causal = False), so it cannot generate.",
            hint="Run it with runner='pooling'.",
        )


def _say(trace: Trace, classes: ModelClasses, module: nn.Module, found: ProbeResult) -> None:
    outer_class = classes.head or classes.base
    trace.decide("build", "model class", type(module).__name__, f"around {outer_class.__name__} of {classes.source}")
    kinds: dict[str, int] = {}
    for facts in found.attention:
        heads = f"{facts.num_heads}/{facts.num_kv_heads} heads of {facts.head_size}"
        parts = [heads, "causal" if facts.causal else "bidirectional", f"scaling {facts.scaling:.6g}"]
        parts += [f"window {facts.window}"] if facts.window else []
        parts += [f"soft-cap {facts.softcap:g}"] if facts.softcap else []
        parts += ["sinks"] if facts.sinks else []
        key = ", ".join(parts)
        kinds[key] = kinds.get(key, 0) + 1
    for key, count in kinds.items():
        trace.decide("build", "attention", f"{count} layers: {key}", "probe: one forward on meta")
