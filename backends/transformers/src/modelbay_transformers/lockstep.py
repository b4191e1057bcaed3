"""Run a model's code with shares operation by operation beside the same code on the whole.

The whole model's run is written down (`Log`); a run of one rank's part must go through the same operations
(`Lockstep`), and what each gives is held against the shape that it has in the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from modelbay_transformers.shares import NotShared, Shape, mark_share, result_share, share_of

_aten = torch.ops.aten
_VIEWS = {_aten.view, _aten._unsafe_view, _aten._reshape_alias, _aten.reshape}
#: Whether they run depends on how a tensor lies in memory.
_INVISIBLE = {_aten.clone, _aten.detach, _aten.alias, _aten.contiguous, _aten.lift_fresh}

#: An operation, and the shapes that it gives.
Entry = tuple[Any, tuple[Shape, ...]]


class Log(TorchDispatchMode):
    """Writes down what operations the whole model runs, and the shapes that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _INVISIBLE:
            self.entries.append((_kind(func), tuple(tuple(t.shape) for t in _tensors(output))))
        return output


def _kind(func: Any) -> Any:
    return _aten.view if func.overloadpacket in _VIEWS else func.overloadpacket


def _tensors(output: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(output)[0] if isinstance(item, torch.Tensor)]


class Lockstep(TorchDispatchMode):
    """Follows shares, beside the log of the whole model."""

    def __init__(self, log: list[Entry]) -> None:
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
