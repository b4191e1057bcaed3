"""Parallel plans as data: which styles there are, what a pattern names, how children fall into stages. No torch.

The format is Transformers': ``{"layers.*.self_attn.q_proj": "colwise"}`` for tensor parallelism, and
``{"layers": (["hidden_states"], ["hidden_states"])}`` for the pipeline, both relative to the base model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from modelbay.errors import ConfigError, UsageError

#: Where a child of the base model lives, of all stages of a pipeline.
Stage = Literal["first", "split", "last", "every"]

#: Every style that has a meaning here: those that Transformers' own plans use.
STYLES: Mapping[str, str] = {
    "colwise": "output features split over ranks",
    "rowwise": "input features split over ranks, outputs summed",
    "colwise_gather_output": "as colwise, outputs gathered",
    "colwise_rep": "older name of colwise_gather_output",
    "rowwise_split_input": "as rowwise, of an input that is whole on every rank",
    "rowwise_rep": "older name of rowwise_split_input",
    "packed_colwise": "several colwise parts in one parameter, each split",
    "packed_rowwise": "several rowwise parts in one parameter, each split",
    "embedding_rowwise": "an embedding split by tokens",
    "embedding_colwise": "an embedding split by features",
    "mla_kv_a_proj": "the latent projection of multi-head latent attention: whole, its rotary part shared by all heads",
    "moe_tp_experts": "the experts of a layer, whose outputs are summed",
    "moe_identity_expert": "experts that hand their input on, counted on one rank",
    "grouped_gemm": "experts split over ranks",
    "ep_dispatch_experts": "experts split over ranks, tokens sent to them",
    "replicate": "whole on every rank",
    "replicated_with_grad_allreduce": "whole on every rank",
    "local_params": "whole on every rank",
    "all_reduce": "outputs summed",
}


def check_tp_plan(plan: Any, where: str) -> None:
    """Refuse a plan with a style that has no meaning here.

    Args:
        where: whose plan it is, for the message.

    Raises:
        ConfigError: naming the pattern, the style, and the styles there are.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{where} must be a dict of patterns and styles, got {plan!r}.")
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, str) or style not in STYLES:
            near = difflib.get_close_matches(str(style), STYLES, n=1)
            known = "Known: " + ", ".join(sorted(STYLES)) + "."
            raise ConfigError(
                f"{where} gives {pattern!r} the unknown style {style!r}.",
                hint=f"Did you mean {near[0]!r}?" if near else known,
            )


def unmatched(plan: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that name nothing. A pattern matches a whole name; ``*`` stands for one level of it."""
    everything = list(names)
    return [pattern for pattern in plan if not any(map(name_pattern(pattern).fullmatch, everything))]


def name_pattern(pattern: str) -> re.Pattern[str]:
    """``layers.*.mlp`` as a regular expression for whole names."""
    return re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))


def check_pp_plan(plan: Any, children: Mapping[str, bool], where: str) -> None:
    """Refuse a pipeline plan that does not say how this model is split (BEHAVIOUR X6).

    Args:
        children: the base model's direct children; whether each is a list of layers (``nn.ModuleList``).
        where: whose plan it is, for the message.

    Raises:
        ConfigError: an entry of another form, a key that is no direct child, or not exactly one list of layers.
    """
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{where} must be a dict of children and their inputs and outputs, got {plan!r}.")
    for name, entry in plan.items():
        if not _is_stage(entry):
            raise ConfigError(
                f'{where}[{name!r}] must be a pair of lists of names, as (["hidden_states"], ["hidden_states"]), '
                f"got {entry!r}."
            )
        if name not in children:
            raise ConfigError(
                f"{where} names {name!r}, which is no direct child of the base model (children: {', '.join(children)})."
            )
    split = [name for name in plan if children[name]]
    if len(split) != 1:
        found = ", ".join(split) or "none"
        raise ConfigError(
            f"{where} must name exactly one nn.ModuleList, the one that is split over stages; it names {found}."
        )


def split_stages(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage: contiguous, and as many as of any other, or one more.

    The stages in the middle have the one more (BEHAVIOUR X6): the ends have the embedding and the head besides.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    if num_layers < stages:
        raise UsageError(f"{num_layers} layers do not divide into pipeline_parallel_size = {stages} stages.")
    each, more = divmod(num_layers, stages)
    from_middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    longer = set(from_middle[:more])
    ranges, start = [], 0
    for stage in range(stages):
        size = each + (stage in longer)
        ranges.append(range(start, start + size))
        start += size
    return ranges


def place_children(plan: Mapping[str, Any], children: Mapping[str, bool]) -> dict[str, Stage]:
    """On which stages each direct child of the base model lives.

    Args:
        plan: one that `check_pp_plan` has passed. children: as there.

    Returns:
        "first" for those that the plan names before its list of layers, "split" for the list, "last" for those after
        it, "every" for those that it does not name.
    """
    places: dict[str, Stage] = dict.fromkeys(children, "every")
    place: Stage = "first"
    for name in plan:
        if children[name]:
            places[name], place = "split", "last"
        else:
            places[name] = place
    return places


def _is_stage(entry: Any) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    return all(isinstance(side, list | tuple) and all(isinstance(n, str) for n in side) for side in entry)
