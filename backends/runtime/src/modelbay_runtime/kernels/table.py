"""Which implementation serves each op: negotiated while the module is built, shown by explain, open to force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from modelbay.errors import BackendError, UsageError
from modelbay.plugins import Owned, Plugins
from modelbay.specs import KernelSpec, load_target
from modelbay.trace import Rejected, Trace

#: The set that has every op. Forcing another set falls back to it for ops that the set does not have.
REFERENCE = "torch"


@dataclass(slots=True)
class Binding:
    """One choice and the layers it serves."""

    op: str
    spec: KernelSpec
    owner: str
    rejected: tuple[Rejected, ...]
    layers: list[int] = field(default_factory=list)


class KernelTable:
    """The kernels that plugins offer, and the choices made so far for one model.

    Args:
        kernels: a set's name to use wherever it has the op, or "auto".
        attention: the same for ``attention.*`` ops; "auto" follows ``kernels``.
    """

    def __init__(
        self, plugins: Plugins, device: torch.device, dtype: torch.dtype, kernels: str = "auto", attention: str = "auto"
    ) -> None:
        self.device = device
        self.dtype = str(dtype).removeprefix("torch.")
        self._by_op: dict[str, list[Owned[KernelSpec]]] = {}
        for owned in plugins.all("kernels"):
            self._by_op.setdefault(owned.value.op, []).append(owned)
        self._kernels = self._known_set(kernels, "kernels")
        self._attention = self._known_set(attention if attention != "auto" else kernels, "attention_backend")
        self._bindings: dict[tuple[str, str, tuple[Rejected, ...]], Binding] = {}

    def _known_set(self, name: str, argument: str) -> str:
        sets = {owned.value.set for specs in self._by_op.values() for owned in specs}
        if name != "auto" and name not in sets:
            raise UsageError(f"{argument}={name!r} is not installed; installed kernel sets: {', '.join(sorted(sets))}.")
        return name

    def bind(self, op: str, facts: Mapping[str, Any]) -> Callable[..., Any]:
        """The implementation of ``op`` for a layer with these facts (``layer`` among them is only reported).

        Raises:
            BackendError: nothing that is installed can serve this layer here, whatever is asked for.
            UsageError: a forced set has the op but cannot serve this layer here, with the reason.
        """
        chosen, fitting, rejected, forced = self._negotiate(op, facts)
        self._record(op, chosen, fitting, rejected, forced, facts.get("layer"))
        return load_target(chosen.value.target)

    def would_choose(self, op: str, facts: Mapping[str, Any]) -> str:
        """The kernel set that `bind` would take, without a record of it."""
        return self._negotiate(op, facts)[0].value.set

    def _negotiate(
        self, op: str, facts: Mapping[str, Any]
    ) -> tuple[Owned[KernelSpec], list[Owned[KernelSpec]], list[Rejected], str]:
        """The choice, what else fits, why the others do not, and the set that was asked for."""
        specs = self._by_op.get(op, [])
        if not specs:
            known = ", ".join(sorted(self._by_op))
            raise BackendError(f"no installed plugin offers the op {op!r}; known ops: {known}.")
        forced = self._attention if op.startswith("attention.") else self._kernels
        full_facts = {**facts, "dtype": self.dtype, "device": self.device.type}
        fitting: list[Owned[KernelSpec]] = []
        reasons: dict[str, list[str]] = {}
        for owned in sorted(specs, key=lambda owned: (-owned.value.priority, owned.value.set)):
            reason = self._why_not(owned.value, full_facts)
            if reason is None:
                fitting.append(owned)
            else:
                reasons.setdefault(owned.value.set, []).append(reason)
        if not fitting:
            why = "; ".join(f"{name}: {', '.join(whys)}" for name, whys in reasons.items())
            raise BackendError(f"no kernel serves {op} here ({why}).")
        # A set may offer an op more than once (compiled, interpreted): it is out only if all of them are.
        sets = {owned.value.set for owned in fitting}
        rejected = [Rejected(name, "; ".join(whys)) for name, whys in reasons.items() if name not in sets]
        chosen = self._choose(op, fitting, rejected, forced, {owned.value.set for owned in specs})
        return chosen, fitting, rejected, forced

    def _why_not(self, spec: KernelSpec, facts: Mapping[str, Any]) -> str | None:
        if self.device.type not in spec.devices:
            return f"runs on {', '.join(spec.devices)}, not {self.device.type}"
        if spec.dtypes and self.dtype not in spec.dtypes:
            return f"takes {', '.join(spec.dtypes)}, not {self.dtype}"
        if spec.available and (reason := load_target(spec.available)()):
            return reason
        return load_target(spec.constraint)(facts) if spec.constraint else None

    @staticmethod
    def _choose(
        op: str, fitting: list[Owned[KernelSpec]], rejected: list[Rejected], forced: str, sets: set[str]
    ) -> Owned[KernelSpec]:
        if forced != "auto" and forced in sets:
            for owned in fitting:
                if owned.value.set == forced:
                    return owned
            reason = next(item.reason for item in rejected if item.option == forced)
            raise UsageError(f"kernel set {forced!r} cannot serve {op}: {reason}.")
        candidates = fitting
        if forced != "auto":  # the forced set lacks this op: the reference, not some third set
            candidates = [owned for owned in fitting if owned.value.set == REFERENCE] or fitting
        return candidates[0]

    def _record(
        self,
        op: str,
        chosen: Owned[KernelSpec],
        fitting: list[Owned[KernelSpec]],
        rejected: list[Rejected],
        forced: str,
        layer: int | None,
    ) -> None:
        why = "lower priority" if forced in ("auto", REFERENCE) and chosen is fitting[0] else f"{forced} was asked for"
        others = [Rejected(owned.value.set, why) for owned in fitting if owned is not chosen]
        key = (op, chosen.value.target, tuple(rejected + others))
        binding = self._bindings.setdefault(key, Binding(op, chosen.value, str(chosen.owner), key[2]))
        if layer is not None:
            binding.layers.append(layer)

    def report(self, trace: Trace) -> None:
        """Append one decision per distinct choice."""
        for binding in self._bindings.values():
            where = f" of layers {_ranges(binding.layers)}" if binding.layers else ""
            source = f"{binding.owner}, priority {binding.spec.priority}"
            trace.decide("kernels", f"{binding.op}{where}", binding.spec.set, source, rejected=binding.rejected)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
