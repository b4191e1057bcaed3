"""Run a model on meta as one of several ranks would, and see that it computes its share of the whole.

Linears are stood in for: by what they give as a whole, and by what a rank's part of them gives. Everything between them
is the model's own code, followed operation by operation (`modelbay_transformers.shares`), in step with a run of the
whole model. Nothing is exchanged and nothing is loaded.

Legend: N query heads, K kv heads, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.probe_run import SMALL, NeedsValues, run_on_meta
from modelbay_transformers.shares import NotShared, Shape, Share, mark_share, result_share, share_of

_aten = torch.ops.aten
_VIEWS = {_aten.view, _aten._unsafe_view, _aten._reshape_alias, _aten.reshape}
#: Whether they run depends on how a tensor lies in memory.
_INVISIBLE = {_aten.clone, _aten.detach, _aten.alias, _aten.contiguous, _aten.lift_fresh}

COLWISE, ROWWISE, GATHER, SPLIT_INPUT, WHOLE = (
    "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "replicated",
)  # fmt: skip


@dataclass(slots=True)
class Division:
    """How a model is divided over ``size`` ranks.

    Attributes:
        styles: linear -> its style; those that are not named are whole.
        parts: colwise linear -> how many different parts there are, where fewer than ranks (KV heads held several
            times).
        sections: colwise linear -> the sizes of what its output holds one after another, each of which is split.
        parameters: parameter -> the dimension that is split, outside of linears.
        attributes: module -> its attributes that count heads, as they are for one rank.
        opaque: modules that divide themselves: they give hidden states.
    """

    size: int
    styles: dict[str, str] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """The heads with which an attention module calls attention on one rank."""

    num_heads: int
    num_kv_heads: int


class Restyle(Exception):
    """A linear gets its input as a share, or whole, other than its style says."""

    def __init__(self, name: str, style: str) -> None:
        super().__init__(name)
        self.name, self.style = name, style


class SplitParameter(Exception):
    """A parameter with one entry for each head meets a share of the heads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Failed(Exception):
    """The model's code raises with shares: ``where`` is the module that it was in, ``latest`` the linear that gave the
    latest share."""

    def __init__(self, where: str, reason: str, latest: str | None) -> None:
        super().__init__(reason)
        self.where, self.reason, self.latest = where, reason, latest


_Entry = tuple[Any, tuple[Shape, ...]]


class Simulation:
    """One model, run as a whole once, and then with as many divisions as are to be tried.

    Args:
        linears: the linears that are called through their forward.
    """

    def __init__(self, base: nn.Module, linears: Mapping[str, Any], opaque: set[str]) -> None:
        self.base, self.opaque = base, opaque
        self.linears: dict[str, Any] = {name: base.get_submodule(name) for name in linears}
        self.names = {module: name for name, module in base.named_modules()}
        self._values = False
        #: Linears and attention modules in the order in which the whole model first calls them.
        self.order: list[str] = []
        self.latest: str | None = None
        self._log: list[_Entry] = self._run_whole()

    def _run_whole(self) -> list[_Entry]:
        log = _Log()
        hooks = [m.register_forward_pre_hook(self._note(name)) for name, m in self.linears.items()]
        try:
            self._run(Division(1), log)
        except NeedsValues:
            self._values, log = True, _Log()
            self._run(Division(1), log)
        finally:
            for hook in hooks:
                hook.remove()
        return log.entries

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self.order.append(name) if name not in self.order else None

    def run(self, division: Division) -> dict[nn.Module, LocalAttention]:
        """Attention module -> its heads on one rank.

        Raises:
            NotShared, Failed, Restyle, SplitParameter: what stands in the way.
        """
        attention = _Attention(self, division.size)
        lockstep = _Lockstep(self._log)
        output = self._run(division, lockstep, attention)
        if share_of(output) is not None:
            raise NotShared("the hidden states that come out are a share", share_of(output).sources)  # type: ignore[union-attr]
        return attention.found

    def _run(self, division: Division, mode: TorchDispatchMode, attention: Any = None) -> torch.Tensor:
        where: list[str] = [""]
        self.latest = None
        with ExitStack() as stack:
            stack.enter_context(dispatch.attending(self.base, attention or self._whole_attention))
            stack.enter_context(_standing_in(self, division))
            stack.enter_context(_inside(self.names, where))
            stack.enter_context(mode)
            try:
                return run_on_meta(self.base, values=self._values).hidden
            except BackendError as error:
                for cause in (error.__cause__, error.__context__):
                    if isinstance(cause, (NotShared, Restyle, SplitParameter)):
                        raise cause from error
                raise Failed(where[-1], error.message, self.latest) from error

    def _whole_attention(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor:
        self.order.append(self.names[module])
        return dispatch.blank(module, q, k, v, mask, facts)


class _Attention:
    """Stands for attention on one rank."""

    def __init__(self, simulation: Simulation, size: int) -> None:
        self.names, self.size = simulation.names, size
        self.found: dict[nn.Module, LocalAttention] = {}

    def __call__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, facts: dict[str, Any]
    ) -> torch.Tensor:
        given = {"q": share_of(q), "k": share_of(k), "v": share_of(v)}
        sources = frozenset[str]().union(*(share.sources for share in given.values() if share))
        heads, kv_heads = q.shape[1], k.shape[1]
        sinks = facts.get("s_aux")
        if not sources and not any(given.values()):
            split = None
        else:
            self._check(given, kv_heads, sources)
            if isinstance(sinks, torch.Tensor):
                self._check_sinks(module, sinks, heads, sources)
            split = Share(2, self.size, sources)
        self.found[module] = LocalAttention(heads, kv_heads)
        return mark_share(dispatch.blank(module, q, k, v, mask, facts), split)

    def _check(self, given: Mapping[str, Share | None], kv_heads: int, sources: frozenset[str]) -> None:
        q, k, v = given["q"], given["k"], given["v"]
        if q is None or (q.dim, q.parts) != (1, self.size):
            raise NotShared("queries are not split by heads", sources)
        if (k is None) != (v is None) or (k is None and kv_heads != 1):
            raise NotShared("of keys and values the one is split, the other not", sources)
        for share in (k, v):
            if share is not None and (share.dim != 1 or (share.parts != self.size and kv_heads != 1)):
                raise NotShared("keys or values are not split by heads", sources)

    def _check_sinks(self, module: nn.Module, sinks: torch.Tensor, heads: int, sources: frozenset[str]) -> None:
        share = share_of(sinks)
        if share is not None and share.parts == self.size and tuple(sinks.shape) == (heads,):
            return
        for name, parameter in module._parameters.items():
            if share is None and parameter is not None and tuple(parameter.shape) == (heads * self.size,):
                raise SplitParameter(f"{self.names[module]}.{name}")
        raise NotShared("the sinks are not split by heads", sources)


class _Log(TorchDispatchMode):
    """Writes down what operations the whole model runs, and the shapes that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[_Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _INVISIBLE:
            self.entries.append((_kind(func), tuple(tuple(t.shape) for t in _tensors(output))))
        return output


def _kind(func: Any) -> Any:
    return _aten.view if func.overloadpacket in _VIEWS else func.overloadpacket


def _tensors(output: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(output)[0] if isinstance(item, torch.Tensor)]


class _Lockstep(TorchDispatchMode):
    """Follows shares, beside the log of the whole model."""

    def __init__(self, log: list[_Entry]) -> None:
        super().__init__()
        self._log, self._at = log, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _INVISIBLE:
            output = func(*args, **kwargs)
            return mark_share(output, share_of(args[0])) if isinstance(output, torch.Tensor) else output
        output = func(*args, **kwargs)
        kind, shapes = self._log[self._at] if self._at < len(self._log) else (None, ())
        self._at += 1
        found = _tensors(output)
        if kind is not _kind(func) or len(shapes) != len(found):
            raise NotShared(f"{func.overloadpacket.__name__} where the whole model runs something else", _sources(args))
        for tensor, whole in zip(found, shapes, strict=True):
            mark_share(tensor, result_share(func, args, kwargs, tensor, whole))
        return output


def _sources(args: Any) -> frozenset[str]:
    shares = (share_of(item) for item in tree_flatten(args)[0] if isinstance(item, torch.Tensor))
    return frozenset[str]().union(*(share.sources for share in shares if share))


@contextmanager
def _inside(names: Mapping[nn.Module, str], where: list[str]) -> Iterator[None]:
    """Keeps ``where`` the path of modules that are running."""
    hooks: list[Any] = []

    def push(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: where.append(name)

    def pop(module: nn.Module, args: Any, output: Any) -> None:
        where.pop()

    try:
        for module, name in names.items():
            hooks += [module.register_forward_pre_hook(push(name)), module.register_forward_hook(pop)]
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _standing_in(simulation: Simulation, division: Division) -> Iterator[None]:
    """Linears and opaque modules are stood in for; parameters and attributes are those of one rank."""
    base, size = simulation.base, division.size
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def put(table: dict[str, Any], key: str, value: Any) -> None:
        kept.append((table, key, table.get(key, _ABSENT)))
        table[key] = value

    try:
        for name, linear in simulation.linears.items():
            put(linear.__dict__, "forward", _linear(simulation, name, linear, division))
        for name in simulation.opaque:
            put(base.get_submodule(name).__dict__, "forward", _give_hidden)
        for name, dim in division.parameters.items() if size > 1 else ():
            path, _, key = name.rpartition(".")
            module = base.get_submodule(path)
            put(module._parameters, key, _local(module._parameters[key], dim, size, name))
        for name, values in division.attributes.items() if size > 1 else ():
            for key, value in values.items():
                put(base.get_submodule(name).__dict__, key, value)
        yield
    finally:
        for table, key, value in reversed(kept):
            if value is _ABSENT:
                del table[key]
            else:
                table[key] = value


_ABSENT = object()


def _give_hidden(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states)


def _local(parameter: Any, dim: int, size: int, name: str) -> nn.Parameter:
    shape = list(parameter.shape)
    if shape[dim] % size:
        raise NotShared(f"{name} {tuple(shape)} does not divide over {size}", frozenset((name,)))
    shape[dim] //= size
    local = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
    mark_share(local, Share(dim, size, frozenset((name,))))
    return local


def _linear(simulation: Simulation, name: str, linear: Any, division: Division) -> Callable[..., torch.Tensor]:
    """The stand-in for one linear on one rank."""
    style = division.styles.get(name, WHOLE) if division.size > 1 else WHOLE
    parts = division.parts.get(name, division.size)
    sections = division.sections.get(name, ())

    def forward(input: torch.Tensor) -> torch.Tensor:
        share, takes_share = share_of(input), style == ROWWISE
        features = share is not None and (share.dim, share.parts) == (input.dim() - 1, division.size)
        if takes_share and share is None:
            raise Restyle(name, SPLIT_INPUT)
        if features and style in (WHOLE, SPLIT_INPUT):
            raise Restyle(name, ROWWISE)
        if share is not None and not (takes_share and features):
            raise NotShared(f"{name} is given a share", share.sources)
        width = linear.out_features
        if style == COLWISE:
            if any(size % parts for size in sections or (width,)):
                raise NotShared(f"the {width} features of {name} do not divide over {parts}", frozenset((name,)))
            width //= parts
        out = input.new_full((*input.shape[:-1], width), SMALL)
        if style == COLWISE:
            simulation.latest = name
        made = Share(input.dim() - 1, parts, frozenset((name,)), sections)
        return mark_share(out, made if style == COLWISE else None)

    return forward
