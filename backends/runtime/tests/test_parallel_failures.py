"""What rank 0 does when things go wrong between ranks (BEHAVIOUR D3); objects of this process play the others.

That processes end, and how long it takes them, is tested with processes, elsewhere.
"""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelbay import LLM, resolve
from modelbay.errors import EngineError, UsageError
from modelbay_runtime.engine.memory import plan_cache
from modelbay_runtime.engine.rank import plan_layout
from modelbay_runtime.engine.runner import BatchOutput
from modelbay_runtime.parallel import executor as executor_module
from modelbay_runtime.parallel import launch
from modelbay_runtime.parallel.channel import Listener, Teller
from modelbay_runtime.parallel.executor import DistributedExecutor
from modelbay_runtime.parallel.launch import LOST, Processes, first_cause, portable
from modelbay_runtime.parallel.member import ThreadShare
from modelbay_runtime.parallel.mesh import Mesh


class Others:
    """The other ranks, and the log of what was said to them and computed here."""

    def __init__(self, words: str | None = None) -> None:
        self.log: list[Any] = []
        self.words = words  # of a rank that ended
        self.error: BaseException | None = None  # of the next round
        self.ended: list[bool] = []

    def tell(self, command: tuple[Any, ...]) -> None:
        self.log.append(command[0])

    def run(self, batch: Any) -> BatchOutput:
        if self.error is not None:
            raise self.error
        self.log.append(f"computed {batch}")
        return BatchOutput(None, None, [batch])

    def end(self, *, at_once: bool = False) -> None:
        self.ended.append(at_once)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    monkeypatch.setattr(executor_module, "_LAST_WORDS_S", 0.0)
    return Others()


def leading(others: Others) -> Any:
    """Rank 0 of two stages, set up without a process."""
    executor: Any = DistributedExecutor.__new__(DistributedExecutor)
    executor.lanes, executor.depth, executor._mesh = 1, 2, Mesh(pp=2)
    executor._rounds, executor._computed = deque(), deque()
    executor._timeout, executor._owner, executor._broken, executor._unclosed = 7.0, os.getpid(), None, None
    executor._teller = SimpleNamespace(tell=others.tell, close=lambda: None)
    executor._started = SimpleNamespace(wait_failed=lambda seconds: others.words, end=others.end)
    executor._threads = ThreadShare(1)
    executor.rank = SimpleNamespace(
        cache=SimpleNamespace(clear=lambda: others.log.append("cleared")), model=torch.nn.Identity()
    )
    executor.runner = SimpleNamespace(run=others.run, device=torch.device("cpu"))
    world = SimpleNamespace(
        to_first=lambda value: [value], traffic=lambda: "bytes", let_go=lambda: others.log.append("let go")
    )
    executor._member = SimpleNamespace(world=world)
    return executor


ASKED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "apply": (lambda executor: executor.apply(type), ["apply"]),
    "traffic": (lambda executor: executor.traffic(), ["traffic"]),
    "clear": (lambda executor: executor.clear_cache(), ["clear", "cleared"]),
}


@pytest.mark.parametrize("what", ASKED)
def test_rounds_under_way_are_computed_before_ranks_are_asked_anything_else(others: Others, what: str) -> None:
    """Ranks that share the last stage with this one wait in a round until it takes part, and hear nothing else."""
    executor = leading(others)
    ask, said = ASKED[what]
    executor.submit(["a"])
    executor.submit(["b"])
    ask(executor)
    assert others.log == ["round", "round", "computed a", "computed b", *said]
    assert [executor.collect()[0].prompt_logprobs for _ in range(2)] == [["a"], ["b"]]  # nothing was lost
    executor.submit(["c"])
    assert executor.collect()[0].prompt_logprobs == ["c"]


def test_closing_lets_ranks_finish_what_is_under_way(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    executor.close()
    executor.close()
    assert others.log == ["round", "computed a", "close", "let go"]
    assert others.ended == [False]
    with pytest.raises(EngineError, match="cannot be used any more: it was closed"):
        executor.submit(["b"])


def test_closing_says_nothing_of_ranks_that_are_gone(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    others.error = RuntimeError("Connection closed by peer")
    executor.close()
    assert others.ended == [True]


def test_what_is_dropped_does_not_hide_why(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    others.words, others.error = "rank 1 fell over", RuntimeError("Connection closed by peer")
    executor.drop()
    assert not executor._rounds
    with pytest.raises(EngineError, match="cannot be used any more: rank 1 fell over"):
        executor.submit(["b"])
    executor.clear_cache()  # nothing to clear, and no error in place of the first one


def test_d3_a_wait_that_was_too_long_names_the_argument(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    others.error = RuntimeError("Timed out waiting 7000ms for recv operation to complete")
    with pytest.raises(EngineError, match="distributed_timeout_seconds = 7, which the slowest step"):
        executor.collect()
    assert others.ended == [True]


def test_a_model_that_fails_here_is_not_blamed_on_others(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    others.words, others.error = "rank 1: Connection closed by peer", ValueError("a kernel fell over")
    with pytest.raises(ValueError, match="a kernel fell over"):
        executor.collect()
    with pytest.raises(EngineError, match="any more: ValueError: a kernel fell over"):
        executor.submit(["b"])


def test_an_interrupt_in_the_middle_ends_the_ranks_and_says_so(others: Others) -> None:
    executor = leading(others)
    executor.submit(["a"])
    others.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        executor.collect()
    with pytest.raises(EngineError, match="any more: it was interrupted"):
        executor.submit(["b"])


def test_a_forked_copy_leaves_the_ranks_alone(others: Others, tmp_path: Path) -> None:
    executor = leading(others)
    executor._owner = -1
    executor.close()
    with pytest.raises(EngineError, match="a copy"):
        executor.submit(["a"])
    executor_module._abandon(-1, executor._teller, executor._member.world, executor._started, executor._threads)
    assert others.log == others.ended == []
    processes = Processes.__new__(Processes)
    processes._owner, processes.folder, processes.processes = -1, tmp_path, {1: None}  # type: ignore[dict-item]
    processes.end(at_once=True)
    assert tmp_path.exists()


# ---- starting ------------------------------------------------------------------------------------------------------


class _Process:
    """Of a rank that never ends by itself."""

    pid = 99

    def __init__(self, log: list[str]) -> None:
        self.log, self.stdin = log, io.BytesIO()

    def wait(self, seconds: float | None = None) -> None:
        if seconds is not None:
            raise subprocess.TimeoutExpired("rank", seconds)

    def kill(self) -> None:
        self.log.append("killed")


def test_ranks_that_were_started_end_when_another_cannot_be(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def start(*args: Any, **kwargs: Any) -> _Process:
        if log:
            raise OSError("no more processes")
        log.append("started")
        return _Process(log)

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no more processes"):
        Processes(resolve(str(checkpoint("llama"))), Mesh(tp=4), 1)
    assert log == ["started", "killed"]
    assert not list(tmp_path.glob("modelbay-*"))


def test_an_argument_that_another_process_cannot_be_told_is_refused(checkpoint: Callable[[str], Path]) -> None:
    resolution = resolve(str(checkpoint("llama")))
    made_here = resolution.args.replace(hf_overrides={"a function": lambda: None})
    resolution = dataclasses.replace(resolution, args=made_here)
    with pytest.raises(UsageError, match=r"hf_overrides = .* cannot be sent to other ranks"):
        portable(resolution)


def ended(folder: Path, codes: dict[int, int], *words: tuple[int, str]) -> str | None:
    for order, (rank, text) in enumerate(words):
        file = folder / f"error-{rank}"
        file.write_text(text)
        os.utime(file, ns=(order, order))
    return first_cause(dict.fromkeys(codes, 5), codes, folder)


def test_d3_the_rank_that_ended_first_is_the_reason(tmp_path: Path) -> None:
    """And not the one with the lowest number, which ended because it was left alone."""
    assert ended(tmp_path, {}) is None
    assert ended(tmp_path, {1: 1, 3: 1}, (3, "a kernel fell over"), (1, "closed by peer")) == "a kernel fell over"


def test_d3_a_rank_that_was_killed_is_the_reason(tmp_path: Path) -> None:
    said = ended(tmp_path, {1: 1, 2: LOST, 3: -9}, (1, "closed by peer"))
    assert said == "rank 3 (process 5) was ended by signal 9"


def test_d3_a_rank_that_lost_the_others_is_no_reason(tmp_path: Path) -> None:
    assert ended(tmp_path, {1: LOST, 2: 1}, (2, "a kernel fell over")) == "a kernel fell over"
    assert ended(tmp_path, {1: LOST}) == f"rank 1 (process 5) ended with exit code {LOST}"


# ---- what ranks of one machine share -------------------------------------------------------------------------------


@pytest.fixture
def four_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_threads_are_given_back_and_not_taken_from_another_model() -> None:
    one = ThreadShare(4)
    assert torch.get_num_threads() == 1
    other = ThreadShare(2)
    one.give_back()
    other.give_back()
    one.give_back()
    assert torch.get_num_threads() == 4
    one = ThreadShare(2)
    torch.set_num_threads(3)  # the user's own wish
    one.give_back()
    assert torch.get_num_threads() == 3


def test_the_cpus_free_memory_is_shared(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from modelbay_runtime.engine import memory

    monkeypatch.setattr(memory, "free_bytes", lambda device, share: 1 << 30)
    with LLM(str(checkpoint("llama")), kv_cache_memory_bytes=1 << 20, max_model_len=64) as llm:
        config, args, specs = llm.resolution.config, llm.resolution.args, llm.engine.executor.rank.built.kv_specs
    args = args.replace(kv_cache_memory_bytes=None, max_num_seqs=1 << 20)
    layout, cpu = plan_layout(specs, 16), torch.device("cpu")
    monkeypatch.setattr(memory, "step_bytes", lambda *given: 0)
    alone, shared = (plan_cache(layout, config, args, cpu, 4, 64, sharers=n) for n in (1, 4))
    assert alone.num_blocks // 4 == shared.num_blocks
    assert "one rank's of 4" in shared.source


# ---- what is told --------------------------------------------------------------------------------------------------


class _Wire:
    """A process group of two, one end each: broadcasts from the first arrive at the second."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def broadcast(self, tensors: list[torch.Tensor]) -> Any:
        self.sent.append(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)


class _OtherEnd:
    def __init__(self, wire: _Wire) -> None:
        self.wire = wire

    def broadcast(self, tensors: list[torch.Tensor]) -> Any:
        tensors[0].copy_(self.wire.sent.popleft())
        return SimpleNamespace(wait=lambda: None)


class _Unreadable:
    def __reduce__(self) -> Any:
        return (_raise, ("no such module here",))


def _raise(words: str) -> None:
    raise ModuleNotFoundError(words)


def test_commands_arrive_in_order_whatever_their_size() -> None:
    wire = _Wire()
    teller = Teller(wire, timeout=1e6)
    commands = [("small",), ("large", b"x" * 100_000), ("exactly", b"y" * (8192 - 8 - 60)), ("close",)]
    for command in commands:
        teller.tell(command)
    teller.close()
    assert list(Listener(_OtherEnd(wire), lambda error: None).commands()) == commands


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_the_garbage_collector_says_in_the_middle_of_a_command_comes_after_it(size: int) -> None:
    """It may end a model in the thread that is telling something for it, between any two steps."""
    wire = _Wire()
    teller = Teller(wire, timeout=1e6)
    send, interruptions = wire.broadcast, [("close",)]

    def broadcast(tensors: list[torch.Tensor]) -> Any:
        if interruptions:
            teller.tell(interruptions.pop())
        return send(tensors)

    wire.broadcast = broadcast  # type: ignore[method-assign]
    teller.tell(("round", b"x" * size))
    teller.close()
    commands = [("round", b"x" * size), ("close",)]
    assert list(Listener(_OtherEnd(wire), lambda error: None).commands()) == commands


def test_a_command_that_cannot_be_read_here_is_this_ranks_own_failure() -> None:
    wire = _Wire()
    teller = Teller(wire, timeout=1e6)
    teller.tell(("round", _Unreadable()))
    teller.close()
    lost: list[BaseException] = []
    with pytest.raises(ModuleNotFoundError, match="no such module here"):
        list(Listener(_OtherEnd(wire), lost.append).commands())
    assert not lost
