"""From Transformers' classes to a module that follows the model contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from modelbay.config import ModelConfig
from modelbay.errors import BackendError
from modelbay.resolve import Resolution
from modelbay.trace import Trace
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay_runtime.api import BuildContext, KVSpec
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.embedding import Head
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers import dispatch
from modelbay_transformers.attention import ServedAttention, StepHolder
from modelbay_transformers.backbones import keep_dtypes
from modelbay_transformers.classes import ModelClasses
from modelbay_transformers.conversion import leave_out_pooler, read_conversion
from modelbay_transformers.expert_parallel import divide_experts
from modelbay_transformers.fuse import fuse_layers, say_fusion
from modelbay_transformers.heads import PoolerWatch, TransformersForSequenceClassification, check_head
from modelbay_transformers.language import language_model_path, serve_attention
from modelbay_transformers.meta import build_on_meta
from modelbay_transformers.model import TransformersForCausalLM, TransformersModel, TransformersWithHead
from modelbay_transformers.multimodal import TransformersForConditionalGeneration
from modelbay_transformers.pack import pack_linears
from modelbay_transformers.plans import check_plans
from modelbay_transformers.probe import ProbeResult, probe
from modelbay_transformers.rotary import fix_rotary
from modelbay_transformers.sliced import looked_up_table, split_embedding
from modelbay_transformers.stages import enter_stage, leave_out_head
from modelbay_transformers.surgery import module_name, replace_head, replace_linears
from modelbay_transformers.tensor_parallel import (
    apply_plan,
    check_something_is_divided,
    is_sliced,
    local_facts,
    plan_ranks,
    slice_linears,
)
from modelbay_transformers.trials import replace_norms


@torch.inference_mode(False)  # there, operations made of others are seen as one
def assemble(
    classes: ModelClasses,
    resolution: Resolution,
    build: BuildContext,
    *,
    check: Callable[[nn.Module, nn.Module], None] | None = None,
) -> nn.Module:
    """Build, probe, attach attention, replace linears, wrap.

    Args:
        check: a plugin's own rules: is called with the outer model and its base model (the same where there is no
            class around it), parameters on meta, before the probe.

    Raises:
        BackendError: the rule that the model breaks.
    """
    dispatch.register()
    outer_class = classes.head or classes.base
    _check_class(outer_class)
    outer = _build(outer_class, classes.config, build, None if classes.media else dispatch.ATTENTION)
    hidden_only = classes.head is None and resolution.task != "generate"
    if hidden_only:
        leave_out_pooler(outer)
    conversion = read_conversion(outer, base_only=hidden_only)
    prefix = _prefix(outer, classes)
    base = outer.get_submodule(prefix) if prefix else outer
    if classes.media and (backbones := resolution.config.backbone_dtypes):
        kept = keep_dtypes(outer, base, {path: getattr(torch, name) for path, name in backbones.items()})
        resolution.trace.decide("build", "towers in their own dtype", kept, "argument dtype=backbone")
    if check is not None:
        check(outer, base)
    check_plans(classes.config, base, resolution.trace, strict=check is not None)
    fix_rotary(base, build.max_model_len, resolution.trace)
    with PoolerWatch(base) as pooler:
        found = probe(base, layer_count=resolution.config.num_layers, longest=build.max_model_len)
    _check_causality(found, resolution)
    spec = resolution.pooling
    if classes.head is not None and spec is not None and spec.num_labels is not None:
        check_head(outer, prefix, pooler.found, found.hidden_size, spec.num_labels)
    room = position_room(base)
    stage = enter_stage(build.parallel, build.device, outer, base, prefix, classes.config, found, resolution)
    divide_experts(build, resolution.plugins, base, resolution.trace)
    table = looked_up_table(build, outer, base)
    holder = StepHolder()
    fusion = fuse_layers(build, resolution.plugins, base, found.attention, holder)
    plan = plan_ranks(build, base, classes.config, found.attention, found.linears, set(fusion.layers), resolution.trace)
    check_something_is_divided(base, build, bool(fusion.layers), plan)
    packed = [] if fusion.layers else pack_linears(build, base, found.linears, plan)
    apply_plan(build, base, plan)
    kv_specs = {block.attention.layer: block.attention.kv_spec for block in fusion.layers.values()}
    for facts in found.attention:
        if facts.name.rpartition(".")[0] not in fusion.layers:
            layer = ServedAttention(build, local_facts(facts, plan), holder)
            dispatch.attach(facts.module, layer)
            kv_specs[facts.layer] = layer.kv_spec
    inside = tuple(f"{name}." for name in fusion.layers) + tuple(name for group in packed for name in group)
    replaced = slice_linears(build, base, plan, inside)
    whole = dataclasses.replace(build, parallel=ParallelContext())
    rest = [name for name in found.linears if not name.startswith(inside) and not is_sliced(plan, name)]
    replaced += replace_linears(whole, base, rest)
    norms = replace_norms(build, base)
    module = _wrap(classes, outer, base, prefix, table, kv_specs, holder, resolution, build)
    module.max_positions, module.stage = room, stage
    if isinstance(module, TransformersForSequenceClassification):
        assert spec is not None, "a classifier was resolved as one"
        module.set_up_head(pooler.found, found.hidden_size, spec)
    conversion.attach(module)
    _say(resolution.trace, classes, outer_class, module, found, replaced)
    say_fusion(resolution.trace, fusion)
    if packed:
        groups = sorted({"+".join(name.rpartition(".")[2] for name in group) for group in packed})
        resolution.trace.decide("build", "packed linears", groups, "probe: given the very same tensor")
    resolution.trace.decide("build", "norms", f"{norms} replaced by the runtime's kernel", "trial: same numbers")
    return module


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


def _wrap(
    classes: ModelClasses,
    outer: Any,
    base: Any,
    prefix: str,
    table: nn.Embedding | None,
    kv_specs: Mapping[int, KVSpec],
    holder: StepHolder,
    resolution: Resolution,
    build: BuildContext,
) -> TransformersModel:
    config = resolution.config
    offset = position_offset(base)
    if prefix and not build.parallel.is_last_stage:
        leave_out_head(outer, base, prefix, build.parallel)
    elif prefix and resolution.task != "classify":
        _replace_head(outer, config, build, table)
    split_embedding(build, outer, table)
    if prefix:
        if not build.parallel.is_last_stage:
            return TransformersForCausalLM(outer, prefix, kv_specs, holder, position_offset=offset)
        if resolution.task == "classify":
            return TransformersForSequenceClassification(outer, prefix, kv_specs, holder, position_offset=offset)
        if classes.media:
            around = TransformersForConditionalGeneration(outer, prefix, kv_specs, holder, position_offset=offset)
            reads = ", ".join(("text", *around.media_kinds))
            resolution.trace.decide("build", "reads", reads, around.media_refusal or f"{type(outer).__name__}.forward")
            return around
        return TransformersForCausalLM(outer, prefix, kv_specs, holder, position_offset=offset)
    if resolution.task != "generate":
        return TransformersModel(base, kv_specs, holder, position_offset=offset)
    embedding = module_name(base, base.get_input_embeddings())
    tied_to = f"model.{embedding}.weight" if config.tie_word_embeddings and embedding else None
    head: Any = Absent(ANOTHER_STAGE, tied_to if build.parallel.is_first_stage else None)
    if build.parallel.is_last_stage:
        whole = tied_to is not None and table is None
        own = dataclasses.replace(build, parallel=ParallelContext()) if whole else build
        head = Head(own, config.hidden_size, config.vocab_size, tied_to=tied_to)
    scale, softcap = logit_factors(config)
    return TransformersWithHead(base, head, scale, kv_specs, holder, softcap, position_offset=offset)


def _replace_head(outer: Any, config: ModelConfig, build: BuildContext, table: nn.Embedding | None) -> None:
    head: Any = outer.get_output_embeddings()
    name = module_name(outer, head)
    if type(head) is not nn.Linear or name is None or head.weight.dtype != build.dtype:
        return
    embedding: Any = outer.get_input_embeddings()
    tied = embedding is not None and getattr(embedding, "weight", None) is head.weight
    if tied and not config.tie_word_embeddings:
        return  # the class ties them by another flag than the text config's: one parameter, as it is
    if tied and build.parallel.tp.size > 1 and embedding is not table:
        return  # the table is whole, and the head is the same parameter
    table_name = module_name(outer, embedding) if tied else None
    replace_head(build, outer, name, f"{table_name}.weight" if table_name else None)


def logit_factors(config: ModelConfig) -> tuple[float, float | None]:
    """(factor, soft-cap) of the logits, from the keys under which models keep what their head does (BEHAVIOUR X8)."""
    factor = float(config.get("logit_scale", 1.0)) / float(config.get("logits_scaling", 1.0))
    softcap = config.get("final_logit_softcapping")
    return factor, None if softcap is None else float(softcap)


def position_offset(base: nn.Module) -> int:
    """RoBERTa and its descendants number positions from the padding index on."""
    module = _numbers_from_padding(base)
    return int(module.padding_idx) + 1 if module else 0


def position_room(base: nn.Module) -> int | None:
    """How many tokens such a model has positions for: its table begins with rows that no token gets."""
    module = _numbers_from_padding(base)
    table = getattr(module, "position_embeddings", None)
    return table.num_embeddings - position_offset(base) if isinstance(table, nn.Embedding) else None


def _numbers_from_padding(base: nn.Module) -> Any:
    for module in base.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and getattr(module, "padding_idx", None) is not None:
            return module
    return None


def _say(
    trace: Trace, classes: ModelClasses, outer_class: Any, module: nn.Module, found: ProbeResult, replaced: int
) -> None:
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
    trace.decide("build", "linears", f"{replaced} replaced by the runtime's", "probe: called through their forward")
