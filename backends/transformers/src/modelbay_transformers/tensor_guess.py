"""Which linears could be split by their outputs, where no plan says so.

That the next linear takes the share is for the simulation to see (`modelbay_transformers.simulate`): a wrong guess
costs a try.

Legend: N query heads, K kv heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from modelbay_transformers.plans import ancestors
from modelbay_transformers.probe import AttentionFacts


class Guesses:
    """Args:
    attention, linears: as the probe saw them.
    order: linears and attention modules, as the model first calls them.
    """

    def __init__(
        self,
        base: nn.Module,
        size: int,
        attention: Sequence[AttentionFacts],
        linears: Mapping[str, Sequence[Any]],
        order: Sequence[str],
    ) -> None:
        self.base, self.size, self.attention, self.linears, self.order = base, size, attention, linears, order

    def columns(self, planned: Container[str]) -> Iterable[str]:
        """Linears that are not ``planned`` and could be split by their outputs: projections to heads, and those that
        widen or come in pairs."""
        by_module = {facts.name: facts for facts in self.attention}
        groups: dict[tuple[str, Any, int], list[str]] = {}
        for name, inputs in self.linears.items():
            linear = self._linear(name)
            groups.setdefault((name.rpartition(".")[0], inputs[0], linear.out_features), []).append(name)
        for (parent, _, width), names in groups.items():
            facts = next((by_module[p] for p in ancestors(parent) if p in by_module), None)
            for name in names:
                if name in planned:
                    continue
                wide = width > self._linear(name).in_features and width % self.size == 0 and not self._fed(name)
                pair = len(names) > 1 and width % self.size == 0 and self._taken_up(parent, width)
                if facts is not None:
                    if self._before(name, facts) and (width in _head_widths(facts) or self._unpacks(name, facts)):
                        yield name
                elif wide or pair:
                    yield name

    def _fed(self, name: str) -> bool:
        """Whether a sibling that was called before it gives as much as it takes: it is the second of the two."""
        order, takes = self.order, self._linear(name).in_features
        earlier = (other for other in order[: order.index(name)] if other in self.linears)
        siblings = (other for other in earlier if other.rpartition(".")[0] == name.rpartition(".")[0])
        return any(self._linear(other).out_features == takes for other in siblings)

    def _taken_up(self, parent: str, width: int) -> bool:
        siblings = (name for name in self.linears if name.rpartition(".")[0] == parent)
        return any(self._linear(name).in_features == width for name in siblings)

    def _before(self, name: str, facts: AttentionFacts) -> bool:
        """Whether the linear is called before the attention that it may be a projection for."""
        return self.order.index(name) < self.order.index(facts.name)

    def _unpacks(self, name: str, facts: AttentionFacts) -> bool:
        """Whether it makes something for each head that is not yet a query, key or value, as of latent vectors."""
        width = self._linear(name).out_features
        inside = [other for other in self.order if other.startswith(f"{facts.name}.")]
        taken_up = any(self._linear(other).in_features == width for other in inside if self._before(other, facts))
        return width % facts.num_heads == 0 and not taken_up

    def _linear(self, name: str) -> Any:
        return self.base.get_submodule(name)


def _head_widths(facts: AttentionFacts) -> set[int]:
    n, k, d, e = facts.num_heads, facts.num_kv_heads, facts.head_size, facts.v_head_size
    packed = {n * d + k * d + k * e, k * (d + e), 2 * n * d}
    return {n * d, n * e, k * d, k * e, n} | packed
