"""The end of a process whose gloo threads may still hold tensors.

A thread of gloo lets go of what it has sent or received some time after ``wait`` has returned. If nobody else holds the
tensor any more, the thread needs the interpreter to free it, and where the interpreter is ending by then, C++ aborts
the process: Python ends the thread in a destructor. So whoever ends waits for them first.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

#: Of the latest calls, so many tensors are looked at: those of a few calls, which is more than the threads of a group.
_LATEST = 32
#: Seconds that are waited at most: a tensor may also be held by whoever is still computing with it.
_PATIENCE_S = 1.0
_POLL_S = 0.001


class Remembering:
    """A process group over gloo, which remembers the latest tensors that it was given, and does not hold them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._latest: deque[weakref.ref[torch.Tensor]] = deque(maxlen=_LATEST)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._group, name)

        def remembering(*args: Any) -> Any:
            self._latest.extend(map(weakref.ref, _tensors(args)))
            return call(*args)

        setattr(self, name, remembering)  # found at once from now on
        return remembering

    @property
    def holds(self) -> bool:
        """Whether one of them is still there."""
        return any(tensor() is not None for tensor in self._latest)


def wait_until_free(groups: Sequence[Remembering], seconds: float = _PATIENCE_S) -> None:
    """Until the threads of these groups have let go of everything, or that time is over."""
    until = time.monotonic() + seconds
    while any(group.holds for group in groups) and time.monotonic() < until:
        time.sleep(_POLL_S)  # without the interpreter, which they need


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)
