"""Experts over several ranks (BEHAVIOUR X7).

Where a trial shows that an experts module computes what the runtime's does, that one takes its place
(`modelbay_transformers.routed_experts`): each expert is sliced over the ranks that share a layer, or experts are split
over all ranks and tokens sent to them. Any other is kept with this rank's experts in it
(`modelbay_transformers.kept_experts`). What a trial does not show to stay the same is whole on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay.plugins import Plugins
from modelbay.trace import Trace
from modelbay_runtime.api import BuildContext
from modelbay_runtime.layers.moe import Experts
from modelbay_transformers.expert_trials import takes_routing
from modelbay_transformers.kept_experts import keep_own, splits
from modelbay_transformers.plans import pattern_of
from modelbay_transformers.routed_experts import find_activation, replace_experts

_WHOLE = "replicated"


def divide_experts(build: BuildContext, plugins: Plugins, base: nn.Module, trace: Trace) -> None:
    """Divide every child ``experts`` of ``base``.

    Raises:
        BackendError: experts are to be parallel, and none of the model's can be.
    """
    parallel = build.parallel
    if parallel.tp.size == 1 and parallel.ep.size == 1:
        return
    kinds: dict[tuple[str, str, str], int] = {}
    divider = _Divider(build, plugins, base)
    for name, module in list(base.named_modules()):
        if name.rpartition(".")[2] != "experts" or isinstance(module, Experts):
            continue
        how, reason = divider.divide(name, module)
        kinds[pattern_of(name), how, reason] = kinds.get((pattern_of(name), how, reason), 0) + 1
    for (pattern, how, reason), count in kinds.items():
        trace.decide("plan", pattern, f"{how} × {count}", reason)
    if parallel.mesh.expert_parallel and kinds and all(how == _WHOLE for _, how, _ in kinds):
        reasons = "; ".join(sorted({reason for _, _, reason in kinds}))
        raise BackendError(f"enable_expert_parallel: the experts of {type(base).__name__} cannot be split: {reasons}.")


class _Divider:
    """Divides one experts module after another. Those of one kind are tried once."""

    def __init__(self, build: BuildContext, plugins: Plugins, base: Any) -> None:
        self.build, self.plugins, self.base = build, plugins, base
        self._activations: dict[Any, str | None] = {}
        self._splits: dict[Any, bool] = {}

    def divide(self, name: str, module: Any) -> tuple[str, str]:
        """How the experts are divided, and why so."""
        if not takes_routing(module):
            return _WHOLE, "its forward does not take each token's experts and their weights"
        count = _count(module)
        if count is None:
            return _WHOLE, "its parameters are not one entry for each expert"
        kind = (type(module), tuple(tuple(p.shape) for p in module.parameters()), _settings(module))
        activation = self._activation(kind, module, count)
        if activation is not None:
            return replace_experts(self.build, self.base, name, module, activation)
        group = self.build.parallel.tp
        if group.size == 1:
            return _WHOLE, "replicas exchange tokens only for experts that are the runtime's"
        if count % group.size:
            return _WHOLE, f"{count} experts do not divide over {group.size} ranks"
        if kind not in self._splits:
            self._splits[kind] = splits(module, count, self.hidden_size)
        if not self._splits[kind]:
            return _WHOLE, "a trial of its parts gives something else than the whole"
        keep_own(module, group, count)
        return "experts split over the ranks that share the layer", "trial: parts of it sum up to the whole"

    @property
    def hidden_size(self) -> int:
        """H of the model."""
        size: int = self.base.config.get_text_config().hidden_size
        return size

    def _activation(self, kind: Any, module: Any, count: int) -> str | None:
        if kind not in self._activations:
            self._activations[kind] = find_activation(self.build, self.plugins, module, count, self.hidden_size)
        return self._activations[kind]


def _settings(module: Any) -> tuple[Any, ...]:
    """Its own plain attributes, by which modules of one class may differ."""
    return tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, (int, float, str, bool)))


def _count(module: Any) -> int | None:
    """E, if the module is a list of experts, or every parameter has one entry for each."""
    if isinstance(module, nn.ModuleList):
        return len(module) if len(module) and not module._parameters else None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    counts = {p.shape[0] for p in module._parameters.values() if p is not None}
    ranks = {p.ndim for p in module._parameters.values() if p is not None}
    return counts.pop() if len(counts) == 1 and ranks <= {2, 3} and 3 in ranks else None
