"""The plan that a module's layers carry out: derived from them, compared with the one that an architecture declares.

A layer states its style where it is made, since its shape depends on it; the ArchSpec states the plan for those who
read it without building anything. Every build compares the two.
"""

from __future__ import annotations

import re

from torch import nn

from modelbay.errors import PluginError
from modelbay.plans import name_pattern
from modelbay.specs import ArchSpec
from modelbay.trace import Trace
from modelbay_runtime.load_targets import Target, find_targets
from modelbay_runtime.parallel.mesh import Mesh

REPLICATED = "replicated"
#: Parameters of routed experts, which a token goes through some of; shared ones are dense.
ROUTED = re.compile(r"(?:^|\.)experts\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_BASE = "model."


def layer_styles(model: nn.Module) -> dict[str, str]:
    """Logical name of each layer, or of a parameter with a style of its own -> style, relative to the base model."""
    styles: dict[str, str] = {}
    for path, module in model.named_modules():
        sections = getattr(module, "packed", ())
        for section in sections:
            styles[".".join(filter(None, (path.rpartition(".")[0], section.name)))] = "colwise"
        if not sections and isinstance(style := getattr(module, "style", None), str):
            styles[path] = style
        for name, own in getattr(module, "styles", {}).items():
            styles[f"{path}.{name}" if name else path] = own
    return {name.removeprefix(_BASE): style for name, style in styles.items()}


def check_plan(model: nn.Module, arch: ArchSpec) -> None:
    """Refuse an architecture whose declared plan is not what its layers do.

    Raises:
        PluginError: naming the pattern or the layer, and both styles.
    """
    if not arch.tp_plan:
        return
    patterns = {pattern: name_pattern(pattern) for pattern in arch.tp_plan}
    for name, style in layer_styles(model).items():
        declared = {arch.tp_plan[pattern] for pattern, compiled in patterns.items() if compiled.fullmatch(name)}
        if declared - {style} or (not declared and style != REPLICATED):
            said = " and ".join(sorted(declared)) or "nothing"
            raise PluginError(f"the layer {name!r} is {style}, and the tp_plan of {arch.name} says {said} of it.")


def report_plan(model: nn.Module, arch: ArchSpec, mesh: Mesh, trace: Trace) -> None:
    """One decision for each kind of parameter: its style, what of it is on this rank, and who says so."""
    if mesh.size == 1:
        return
    styles = layer_styles(model)
    rows: dict[str, tuple[str, str]] = {}
    for name, target in find_targets(model, tie=False).by_name.items():
        logical = name.removeprefix(_BASE)
        owner = logical.rpartition(".")[0]
        packed_in = target.storage.name.removeprefix(_BASE)
        style = styles.get(logical) or styles.get(packed_in) or styles.get(owner, REPLICATED)
        if mesh.expert_parallel and ROUTED.search(logical):
            style = "grouped_gemm"
        declared = any(name_pattern(pattern).fullmatch(owner) for pattern in arch.tp_plan)
        source = "plan" if declared and target.shard is not None else "layer"
        answer = f"{style}, {_held(target)}" if target.shard is not None else REPLICATED
        rows.setdefault(_NUMBER.sub("*", logical), (answer, source))
    for pattern, (answer, source) in rows.items():
        trace.decide("plan", pattern, answer, source)


def _held(target: Target) -> str:
    shard, whole = target.shard, target.whole_shape()
    assert shard is not None
    padding = f" and {shard.pad} of padding" if shard.pad else ""
    return f"{shard.size}{padding} of {whole[shard.dim]} along dimension {shard.dim} of {list(whole)}"
