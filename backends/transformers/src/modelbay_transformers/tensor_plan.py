"""Which style each linear of a Transformers model gets (BEHAVIOUR X5): from the plan of its config, or inferred.

Both are proposals. `modelbay_transformers.simulate` runs the model with them on meta; what is not shown to compute a
share of the whole is changed until everything is: a linear whose output cannot stay a share gives it back whole
(gathered), one that gets its input whole takes its part of it, and what was only inferred goes back to being whole.

Legend: N query heads, K kv heads, D head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelbay.errors import BackendError
from modelbay.trace import Trace
from modelbay_transformers.division import COLWISE, GATHER, ROWWISE, SPLIT_INPUT, WHOLE, Division
from modelbay_transformers.plans import ancestors, pattern_of, planned_styles
from modelbay_transformers.probe import AttentionFacts
from modelbay_transformers.shares import NotShared
from modelbay_transformers.simulate import Failed, LocalAttention, Simulation, SplitParameter
from modelbay_transformers.stand_ins import Restyle
from modelbay_transformers.tensor_guess import Guesses

PLAN, INFERRED, REPLICATED = "plan", "inferred", "replicated"
#: Styles of linears in Transformers' words, older names included; others leave a linear whole.
_OF_LINEARS = {
    COLWISE: COLWISE, ROWWISE: ROWWISE, GATHER: GATHER, "colwise_rep": GATHER, SPLIT_INPUT: SPLIT_INPUT,
    "rowwise_rep": SPLIT_INPUT,
}  # fmt: skip
#: Attributes with which attention modules count heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_WIDTHS = ("all_head_size", "embed_dim", "inner_dim", "hidden_size", "attn_dim", "query_size")
_MOST_TRIES = 200


@dataclass(slots=True)
class TensorPlan:
    """What came out: the division, each attention module's heads on one rank, and why."""

    division: Division
    attention: dict[nn.Module, LocalAttention]
    sources: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def divided(self) -> bool:
        return bool(self.division.styles or self.division.parameters)


def plan_tensors(
    base: nn.Module,
    config: Any,
    size: int,
    attention: Sequence[AttentionFacts],
    linears: Mapping[str, Sequence[Any]],
    opaque: set[str],
) -> TensorPlan:
    """Divide ``base`` over ``size`` ranks.

    Args:
        attention, linears: as the probe saw them.
        opaque: modules that divide themselves.
    """
    inside = tuple(f"{name}." for name in opaque)
    outside = {name: inputs for name, inputs in linears.items() if not name.startswith(inside)}
    planned = {name: style for name, style in planned_styles(base, config).items() if name in outside}
    planner = _Planner(base, size, [facts for facts in attention if not facts.name.startswith(inside)], outside, opaque)
    planner.propose(planned)
    return planner.settle()


class _Planner:
    def __init__(
        self,
        base: nn.Module,
        size: int,
        attention: Sequence[AttentionFacts],
        linears: Mapping[str, Sequence[Any]],
        opaque: set[str],
    ) -> None:
        self.base, self.size, self.attention, self.linears = base, size, attention, linears
        self.simulation = Simulation(base, linears, opaque)
        self.division = Division(size)
        self.plan = TensorPlan(self.division, {})
        #: Patterns of modules and linears of which something was tried that is tried once.
        self._tried: set[str] = set()

    # Proposals

    def propose(self, planned: Mapping[str, str]) -> None:
        for name, style in planned.items():
            if style in _OF_LINEARS and self._divides(name, _OF_LINEARS[style]):
                self._set(name, _OF_LINEARS[style], PLAN)
        for name in Guesses(self.base, self.size, self.attention, self.linears, self.simulation.order).columns(planned):
            if self._divides(name, COLWISE):
                self._set(name, COLWISE, INFERRED)
        for facts in self.attention:
            self._repeat_kv(facts)

    def _linear(self, name: str) -> Any:
        return self.base.get_submodule(name)

    def _divides(self, name: str, style: str) -> bool:
        linear = self._linear(name)
        if style in (ROWWISE, SPLIT_INPUT):
            return not linear.in_features % self.size
        return style == COLWISE or not linear.out_features % self.size

    def _set(self, name: str, style: str, source: str) -> None:
        self.division.styles[name] = style
        self.plan.sources[name] = source

    def _repeat_kv(self, facts: AttentionFacts) -> None:
        """Fewer KV heads than ranks: each is held by several."""
        heads, kv_heads = facts.num_heads, facts.num_kv_heads
        if kv_heads >= self.size:
            return
        kv_widths = {kv_heads * facts.head_size, kv_heads * facts.v_head_size}
        for name, style in list(self.division.styles.items()):
            linear = self._linear(name)
            if style != COLWISE or not name.startswith(f"{facts.name}.") or linear.out_features not in kv_widths:
                continue
            if linear.out_features == heads * facts.head_size and kv_heads != heads and "k_" not in name:
                continue
            if kv_heads == 1:
                self._whole(name, "one KV head, the same for all ranks")
            elif self.size % kv_heads == 0:
                self.division.parts[name] = kv_heads

    # Changes

    def settle(self) -> TensorPlan:
        """Try, and change what stands in the way, until nothing does."""
        for _ in range(_MOST_TRIES):
            try:
                self.plan.attention = self.simulation.run(self.division)
                self._drop_undivided()
                return self.plan
            except Restyle as change:
                self._restyle(change)
            except SplitParameter as found:
                self._split_parameter(found.name)
            except NotShared as error:
                self._give_up(error.sources, error.reason)
            except Failed as error:
                self._repair(error)
        raise BackendError(f"{type(self.base).__name__} could not be divided over {self.size} ranks.")

    def _alike(self, name: str, names: Iterable[str]) -> list[str]:
        pattern = pattern_of(name)
        return [other for other in names if pattern_of(other) == pattern]

    def _restyle(self, change: Restyle) -> None:
        for name in self._alike(change.name, self.linears):
            source = self.plan.sources.get(name, INFERRED)
            if change.style == SPLIT_INPUT and (source == INFERRED or not self._divides(name, SPLIT_INPUT)):
                self._whole(name, "its input is whole")
            elif not self._divides(name, change.style):
                raise BackendError(
                    f"{name} takes {self._linear(name).in_features} features, which {self.size} ranks do not divide."
                )
            else:
                self._set(name, change.style, source)

    def _split_parameter(self, found: str) -> None:
        names = [name for name, _ in self.base.named_parameters()]
        for name in self._alike(found, names):
            self.division.parameters[name] = 0
            self.plan.sources[name] = INFERRED

    def _whole(self, name: str, reason: str) -> None:
        self.division.styles.pop(name, None)
        self.division.parts.pop(name, None)
        self.division.sections.pop(name, None)
        self.plan.sources.pop(name, None)
        self.plan.reasons[pattern_of(name)] = reason

    def _give_up(self, sources: frozenset[str], reason: str) -> None:
        """What ``sources`` give cannot stay a share: of attention, its heads counted for one rank may help, or to take
        the output for several things."""
        if not sources:
            raise BackendError(f"{type(self.base).__name__} could not be divided over {self.size} ranks: {reason}.")
        if self._count_heads(sources) or (len(set(map(pattern_of, sources))) == 1 and self._section(sources)):
            return
        for source in sources:
            for name in self._alike(source, [*self.division.styles, *self.division.parameters]):
                self._no_share(name, reason)

    def _no_share(self, name: str, reason: str) -> None:
        if name in self.division.parameters:
            del self.division.parameters[name]
            self.plan.reasons[pattern_of(name)] = reason
            return
        if self.division.styles.get(name) != COLWISE:
            return
        self.division.parts.pop(name, None)
        self.division.sections.pop(name, None)
        if self.plan.sources[name] == PLAN and self._divides(name, GATHER):
            self.division.styles[name] = GATHER
            self.plan.reasons[pattern_of(name)] = reason
        else:
            self._whole(name, reason)

    def _repair(self, error: Failed) -> None:
        """The code raised: in the nearest module around that has shares in it, the latest is the one to change."""
        shares = [name for name, style in self.division.styles.items() if style == COLWISE]
        if self._count_whole_heads(error.where, shares):
            return
        for module in ancestors(error.where):
            inside = [name for name in shares if not module or name.startswith(f"{module}.")]
            if not inside:
                continue
            if not self._count_heads(frozenset(inside)):
                self._give_up(frozenset((error.latest if error.latest in inside else inside[-1],)), error.reason)
            return
        raise BackendError(f"{type(self.base).__name__} could not be divided over {self.size} ranks: {error.reason}")

    def _count_whole_heads(self, where: str, shares: Sequence[str]) -> bool:
        """Take back the head counts of modules like the one around ``where``, if it turned out to be whole."""
        around = next((name for name in ancestors(where) if name in self.division.attributes), None)
        if around is None or any(name.startswith(f"{around}.") for name in shares):
            return False
        for name in self._alike(around, list(self.division.attributes)):
            del self.division.attributes[name]
        return True

    def _count_heads(self, sources: frozenset[str]) -> bool:
        """Try once, for each kind of attention module, with its head counts divided."""
        changed = False
        for facts in self.attention:
            pattern = pattern_of(facts.name)
            if not any(pattern_of(source).startswith(f"{pattern}.") for source in sources):
                continue
            if pattern in self._tried or facts.num_heads % self.size:
                continue
            for other in self.attention:
                if pattern_of(other.name) == pattern:
                    values = _local_counts(other, self.size)
                    if values:
                        self.division.attributes[other.name] = values
                        changed = True
            self._tried.add(pattern)
        return changed

    def _section(self, sources: frozenset[str]) -> bool:
        """Try once, for each kind of linear, whether its output holds several things one after another."""
        changed = False
        for source in sources:
            if source in self.division.parameters or pattern_of(source) in self._tried:
                continue
            self._tried.add(pattern_of(source))
            for name in self._alike(source, self.division.styles):
                sizes = self._sizes(name)
                if self.division.styles[name] == COLWISE and sizes and not any(size % self.size for size in sizes):
                    self.division.sections[name] = sizes
                    changed = True
        return changed

    def _sizes(self, name: str) -> tuple[int, ...]:
        width, facts = self._linear(name).out_features, self._attention_around(name)
        if facts is None:
            return (width // 2, width // 2) if width % 2 == 0 else ()
        n, k, d, e = facts.num_heads, facts.num_kv_heads, facts.head_size, facts.v_head_size
        fused = (n * d, k * d, k * e)
        return fused if width == sum(fused) and k % self.size == 0 else ()

    def _attention_around(self, name: str) -> AttentionFacts | None:
        return next((facts for facts in self.attention if name.startswith(f"{facts.name}.")), None)

    def _drop_undivided(self) -> None:
        """Head counts of modules that turned out to be whole are as they were."""
        for facts in self.attention:
            local = self.plan.attention.get(facts.module)
            if local is not None and local.num_heads == facts.num_heads:
                self.division.attributes.pop(facts.name, None)


def _local_counts(facts: AttentionFacts, size: int) -> dict[str, int]:
    module: Any = facts.module
    heads, kv_heads, width = facts.num_heads, facts.num_kv_heads, facts.num_heads * facts.head_size
    local_kv = max(kv_heads // size, 1)
    wanted = [(_HEADS, heads, heads // size), (_KV_HEADS, kv_heads, local_kv), (_WIDTHS, width, width // size)]
    values: dict[str, int] = {}
    for names, whole, local in wanted:
        for name in names:
            if vars(module).get(name) == whole:
                values[name] = local
    groups = vars(module).get("num_key_value_groups")
    if groups == heads // kv_heads and heads // size // local_kv != groups:
        values["num_key_value_groups"] = heads // size // local_kv
    return values


def say_tensor_plan(trace: Trace, base: nn.Module, plan: TensorPlan, linears: Iterable[str]) -> None:
    """A decision for each kind of linear, split parameter, and the rest."""
    division = plan.division
    kinds: dict[tuple[str, str, str], int] = {}
    for name in (*linears, *division.parameters):
        style = division.styles.get(name, "split by heads" if name in division.parameters else WHOLE)
        parts = division.parts.get(name)
        style += f" ({parts} parts for {division.size} ranks)" if parts else ""
        key = (pattern_of(name), style, plan.sources.get(name, REPLICATED))
        kinds[key] = kinds.get(key, 0) + 1
    for (pattern, style, source), count in kinds.items():
        reason = plan.reasons.get(pattern)
        trace.decide("plan", pattern, f"{style} × {count}", source + (f": {reason}" if reason else ""))
    for pattern, count in _rest(base, set(linears), division).items():
        trace.decide("plan", pattern, f"{WHOLE} × {count}", REPLICATED)


def _rest(base: nn.Module, linears: set[str], division: Division) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, _ in base.named_parameters():
        if name.rpartition(".")[0] in linears or name in division.parameters:
            continue
        found[pattern_of(name)] = found.get(pattern_of(name), 0) + 1
    return found
