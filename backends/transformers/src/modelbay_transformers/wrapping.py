"""Transformers' model becomes a module that follows the model contract: which class wraps it, and what its head is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from modelbay.config import ModelConfig
from modelbay.resolve import Resolution
from modelbay.weights.matching import ANOTHER_STAGE
from modelbay_runtime.api import BuildContext, KVSpec, NoKV
from modelbay_runtime.layers.absent import Absent
from modelbay_runtime.layers.embedding import Head
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_transformers.attention import StepHolder
from modelbay_transformers.classes import ModelClasses
from modelbay_transformers.heads import TransformersForSequenceClassification
from modelbay_transformers.model import TransformersForCausalLM, TransformersModel, TransformersWithHead
from modelbay_transformers.multimodal import TransformersForConditionalGeneration
from modelbay_transformers.positions import padded_numbering
from modelbay_transformers.sliced import split_embedding
from modelbay_transformers.stages import leave_out_head
from modelbay_transformers.surgery import module_name, replace_head


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """Transformers' own instance. ``base`` computes hidden states; ``prefix`` is its name in ``outer``, empty where
    there is no class around it."""

    classes: ModelClasses
    outer: Any
    base: Any
    prefix: str


def wrap(
    model: Unwrapped,
    table: nn.Embedding | None,
    kv_specs: dict[int, KVSpec],
    holder: StepHolder,
    resolution: Resolution,
    build: BuildContext,
) -> TransformersModel:
    """The module that the runner sees; embedding and head are split and replaced on the way.

    Args:
        table: the embedding of tokens, if it is to be split over ranks.
    """
    outer, base, prefix = model.outer, model.base, model.prefix
    if prefix and not build.parallel.is_last_stage:
        leave_out_head(outer, base, prefix, build.parallel)
    elif prefix and resolution.task != "classify":
        _replace_head(outer, resolution.config, build, table)
    split_embedding(build, outer, table)
    numbering = padded_numbering(base, whole=all(isinstance(spec, NoKV) for spec in kv_specs.values()))
    if not prefix and resolution.task != "generate":
        return TransformersModel(base, kv_specs, holder, numbering=numbering)
    if not prefix:
        head = _own_head(base, resolution.config, build, table)
        scale, softcap = logit_factors(resolution.config)
        return TransformersWithHead(base, head, scale, kv_specs, holder, softcap, numbering=numbering)
    if build.parallel.is_last_stage and resolution.task == "classify":
        return TransformersForSequenceClassification(outer, prefix, kv_specs, holder, numbering=numbering)
    if build.parallel.is_last_stage and model.classes.media:
        around = TransformersForConditionalGeneration(outer, prefix, kv_specs, holder, numbering=numbering)
        reads = ", ".join(("text", *around.media_kinds))
        resolution.trace.decide("build", "reads", reads, around.media_refusal or f"{type(outer).__name__}.forward")
        return around
    return TransformersForCausalLM(outer, prefix, kv_specs, holder, numbering=numbering)


def _own_head(base: Any, config: ModelConfig, build: BuildContext, table: nn.Embedding | None) -> Head | Absent:
    """A head over the vocabulary for a base model without a class around it."""
    embedding = module_name(base, base.get_input_embeddings())
    tied_to = f"model.{embedding}.weight" if config.tie_word_embeddings and embedding else None
    if not build.parallel.is_last_stage:
        return Absent(ANOTHER_STAGE, tied_to if build.parallel.is_first_stage else None)
    whole = tied_to is not None and table is None
    own = dataclasses.replace(build, parallel=ParallelContext()) if whole else build
    return Head(own, config.hidden_size, config.vocab_size, tied_to=tied_to)


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
