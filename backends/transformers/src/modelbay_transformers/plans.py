"""The parallel plans that a model's config class declares: checked while it is built, shown by explain (X5, X6)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from modelbay.errors import ConfigError
from modelbay.plans import check_pp_plan, check_tp_plan, name_pattern, unmatched
from modelbay.trace import Trace

TP_PLAN, PP_PLAN = "base_model_tp_plan", "base_model_pp_plan"


def check_plans(config: Any, base: nn.Module, trace: Trace, *, strict: bool) -> None:
    """Check the plans of ``config`` (and the styles in those of its sub-configs) against the base model.

    Args:
        strict: for plans that somebody wrote for this very model. Transformers' own list patterns for several kinds of
            layers, and a few inherit a pipeline plan that does not fit: there what does not match is shown.

    Raises:
        ConfigError: an unknown style, or (strict) a pipeline plan that does not fit the model's children.
    """
    owner = type(config).__name__
    for part in [config, *_sub_configs(config)]:
        if plan := getattr(part, TP_PLAN, None):
            check_tp_plan(plan, f"{type(part).__name__}.{TP_PLAN}")
    if plan := getattr(config, TP_PLAN, None):
        names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
        missed = unmatched(plan, names)
        note = f"; match nothing: {', '.join(missed)}" if missed else ""
        level = "warning" if missed and strict else "info"
        trace.decide("plan", TP_PLAN, f"{len(plan)} patterns{note}", owner, level=level)  # type: ignore[arg-type]
    if plan := getattr(config, PP_PLAN, None):
        children = {name: isinstance(child, nn.ModuleList) for name, child in base.named_children()}
        answer = ", ".join(plan)
        try:
            check_pp_plan(plan, children, f"{owner}.{PP_PLAN}")
        except ConfigError as error:
            if strict:
                raise
            answer = f"none: {error}"
        trace.decide("plan", PP_PLAN, answer, owner)


def _plans_of(base: nn.Module, config: Any) -> Iterable[tuple[str, str]]:
    """(pattern, style) of the config's tensor plan and those of its sub-configs, each for the part of the model
    that is built from it."""
    for part in [config, *_sub_configs(config)]:
        plan = getattr(part, TP_PLAN, None) or {}
        prefix = "" if part is config else _built_from(base, part)
        if prefix is not None:
            for pattern, style in plan.items():
                yield f"{prefix}.{pattern}" if prefix else pattern, style


def _built_from(base: Any, part: Any) -> str | None:
    """The name of the outermost module that has this config."""
    if type(getattr(base, "config", None)) is type(part):
        return ""
    names = [name for name, module in base.named_modules() if type(getattr(module, "config", None)) is type(part)]
    return min(names, key=lambda name: name.count("."), default=None)


def planned_styles(base: nn.Module, config: Any) -> dict[str, str]:
    """Module or parameter -> style."""
    names = [name for name, _ in base.named_modules()] + [name for name, _ in base.named_parameters()]
    found: dict[str, str] = {}
    for pattern, style in _plans_of(base, config):
        matches = name_pattern(pattern).fullmatch
        found.update((name, style) for name in names if matches(name))
    return found


def pattern_of(name: str) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def ancestors(name: str) -> Iterable[str]:
    """``a.b.c``, ``a.b``, ``a`` and the empty name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _sub_configs(config: Any) -> list[Any]:
    found = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return [part for part in found if part is not None]
