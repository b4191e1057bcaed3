"""Run a model on meta as one of several ranks would, and see that it computes its share of the whole.

Linears are stood in for: by what they give as a whole, and by what a rank's part of them gives. Everything between them
is the model's own code, followed operation by operation (`modelbay_transformers.lockstep`). Nothing is exchanged and
nothing is loaded.

Legend: N query heads, K kv heads, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelbay.errors import BackendError
from modelbay_transformers import dispatch
from modelbay_transformers.division import Division
from modelbay_transformers.lockstep import Entry, Lockstep, Log
from modelbay_transformers.probe_run import NeedsValues, run_on_meta
from modelbay_transformers.shares import NotShared, Share, mark_share, share_of
from modelbay_transformers.stand_ins import Restyle, standing_in


@dataclass(frozen=True, slots=True)
class LocalAttention:
    """The heads with which an attention module calls attention on one rank."""

    num_heads: int
    num_kv_heads: int


class SplitParameter(Exception):
    """A parameter with one entry for each head meets a share of the heads."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Failed(Exception):
    """The model's code raises with shares: ``where`` is the module that it was in, ``latest`` the linear that gave the
    latest share, "" if none did."""

    def __init__(self, where: str, reason: str, latest: str) -> None:
        super().__init__(reason)
        self.where, self.reason, self.latest = where, reason, latest


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
        self._log: list[Entry] = self._run_whole()

    def _run_whole(self) -> list[Entry]:
        log = Log()
        hooks = [m.register_forward_pre_hook(self._note(name)) for name, m in self.linears.items()]
        try:
            self._run(Division(1), log)
        except NeedsValues:
            self._values, log = True, Log()
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
        lockstep = Lockstep(self._log)
        output = self._run(division, lockstep, attention)
        if share_of(output) is not None:
            raise NotShared("the hidden states that come out are a share", share_of(output).sources)  # type: ignore[union-attr]
        return attention.found

    def _run(self, division: Division, mode: TorchDispatchMode, attention: Any = None) -> torch.Tensor:
        where, latest = [""], [""]
        with ExitStack() as stack:
            stack.enter_context(dispatch.attending(self.base, attention or self._whole_attention))
            stack.enter_context(standing_in(self.base, self.linears, self.opaque, division, latest))
            stack.enter_context(_inside(self.names, where))
            stack.enter_context(mode)
            try:
                return run_on_meta(self.base, values=self._values).hidden
            except BackendError as error:
                for cause in (error.__cause__, error.__context__):
                    if isinstance(cause, (NotShared, Restyle, SplitParameter)):
                        raise cause from error
                raise Failed(where[-1], error.message, latest[-1]) from error

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
