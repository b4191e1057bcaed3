"""D3: a process ends only when the threads of its groups hold no tensor that they would need the interpreter for."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from modelbay_runtime.parallel.letting_go import Remembering, wait_until_free


class _Slow:
    """A group one of whose threads lets go late, as gloo's does: what it holds is C++'s alone."""

    def __init__(self) -> None:
        self.holding: list[Any] = []

    def allgather(self, parts: list[list[torch.Tensor]], own: list[torch.Tensor]) -> None:
        # The product's backward keeps both factors, in C++.
        self.holding += [part * torch.ones(2, requires_grad=True) for part in (*parts[0], *own)]

    def let_go(self, after: float) -> threading.Timer:
        timer = threading.Timer(after, self.holding.clear)
        timer.start()
        return timer


def gathered(group: Any) -> None:
    group.allgather([[torch.zeros(2), torch.zeros(2)]], [torch.zeros(2)])


def test_d3_who_ends_waits_for_what_threads_hold() -> None:
    slow = _Slow()
    group = Remembering(slow)
    gathered(group)
    assert group.holds
    timer = slow.let_go(0.2)
    wait_until_free([group], 60)
    timer.join()
    assert not slow.holding
    assert not group.holds


def test_d3_nobody_waits_for_ever() -> None:
    slow = _Slow()
    group = Remembering(slow)
    gathered(group)
    began = time.monotonic()
    wait_until_free([group], 0.05)
    assert time.monotonic() - began >= 0.05
    assert group.holds


def test_d3_what_is_free_is_not_waited_for() -> None:
    slow = _Slow()
    group = Remembering(slow)
    gathered(group)
    slow.holding.clear()
    assert not group.holds
