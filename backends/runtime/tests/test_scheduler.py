"""Who runs next: budgets, order, chunks, preemption, siblings. Without a model: tokens are made up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay.errors import EngineError
from modelbay_runtime.engine.block_pool import BlockPool
from modelbay_runtime.engine.kv_layout import plan_layout
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.sampling_state import SamplingState
from modelbay_runtime.engine.scheduler import Scheduled, Scheduler
from modelbay_runtime.engine.sequence import Sequence, Status
from modelbay_runtime.kv_spec import FullKV, KVSpec, SlidingKV
from modelbay_runtime.sampling_params import SamplingParams

FULL, SLIDING = FullKV(1, 4, 4), SlidingKV(1, 4, 4, 10)


def make_scheduler(
    blocks: int = 64, *, seqs: int = 8, tokens: int = 32, chunked: bool = True, caching: bool = True, **more: Any
) -> Scheduler:
    specs: dict[int, KVSpec] = more.get("specs", {0: FULL})
    kv = KVManager(plan_layout(specs, 4), BlockPool(blocks + 1), seqs, 256, caching)
    return Scheduler(kv, seqs, tokens, chunked)


def make_sequence(length: int, name: str = "r", start: int = 0, leader: Sequence | None = None) -> Sequence:
    state = SamplingState(SamplingParams(), [], name)
    return Sequence(name, 0, length, list(range(start, start + length)), sampling=state, leader=leader)


def compute(scheduler: Scheduler, scheduled: list[Scheduled], token: int = 7) -> None:
    """What the engine does after a step."""
    sampled = [item.sequence for item in scheduled if item.samples]
    for item in scheduled:
        item.sequence.num_computed += item.num_new
        scheduler.kv.publish(item.sequence)
    for sequence in sampled:
        sequence.append(token)


def plan(scheduled: list[Scheduled]) -> list[tuple[str, int]]:
    return [(item.sequence.request_id, item.num_new) for item in scheduled]


def test_a_long_prompt_is_split_and_decodes_go_first() -> None:
    scheduler = make_scheduler(tokens=16)
    scheduler.add(make_sequence(6, "a"))
    scheduler.add(make_sequence(40, "b", 100))
    steps = []
    for _ in range(5):
        scheduled = scheduler.schedule()
        steps.append(plan(scheduled))
        compute(scheduler, scheduled)
    assert steps == [
        [("a", 6), ("b", 10)],
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 1)],
        [("a", 1), ("b", 1)],
    ]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    scheduler = make_scheduler(tokens=16, chunked=False)
    for sequence in (make_sequence(6, "a"), make_sequence(12, "b", 100), make_sequence(3, "c", 200)):
        scheduler.add(sequence)
    first = scheduler.schedule()
    assert plan(first) == [("a", 6)]  # c would fit, but does not overtake b
    compute(scheduler, first)
    assert plan(scheduler.schedule()) == [("a", 1), ("b", 12), ("c", 3)]


def test_no_more_sequences_than_allowed_and_first_come_first_served() -> None:
    scheduler = make_scheduler(seqs=2)
    sequences = [make_sequence(5, str(i), 10 * i) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("0", 5), ("1", 5)]
    compute(scheduler, scheduled)
    scheduler.finish(sequences[0])
    assert plan(scheduler.schedule()) == [("1", 1), ("2", 5)]


def test_the_last_to_arrive_is_preempted_and_starts_over_first() -> None:
    """Five blocks of four tokens: two sequences of eight fit, until both grow."""
    scheduler = make_scheduler(5, caching=False)
    first, second, third = (make_sequence(8, name, start) for name, start in (("a", 0), ("b", 100), ("c", 200)))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("a", 8), ("b", 8)]
    compute(scheduler, scheduled)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("a", 1)]
    assert (second.status, second.num_computed, second.num_preemptions) == (Status.WAITING, 0, 1)
    assert list(scheduler.waiting) == [second, third]
    compute(scheduler, scheduled)
    scheduler.finish(first)
    assert plan(scheduler.schedule()) == [("b", 9), ("c", 8)]  # b: its prompt and what it had drawn
    assert scheduler.num_preemptions == 1


def test_a_pool_that_cannot_hold_one_sequence_is_an_error_with_the_numbers() -> None:
    scheduler = make_scheduler(3)
    scheduler.add(make_sequence(13))
    with pytest.raises(EngineError, match=r"\(3 blocks\) cannot hold one sequence of 13 tokens"):
        scheduler.schedule()


def test_siblings_wait_for_the_leader_s_prompt_and_others_overtake_them() -> None:
    scheduler = make_scheduler(tokens=12)
    leader = make_sequence(20, "a")
    sibling, other = make_sequence(20, "a2", leader=leader), make_sequence(2, "b", 100)
    for sequence in (leader, sibling, other):
        scheduler.add(sequence)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("a", 12)]
    compute(scheduler, scheduled)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("a", 8), ("b", 2)]
    assert list(scheduler.waiting) == [sibling]
    compute(scheduler, scheduled)
    scheduled = scheduler.schedule()
    assert plan(scheduled) == [("a", 1), ("b", 1), ("a2", 4)]
    assert sibling.num_cached == 16


def test_a_sibling_does_not_wait_for_a_leader_that_is_gone() -> None:
    scheduler = make_scheduler()
    leader = make_sequence(20, "a")
    sibling = make_sequence(20, "a2", leader=leader)
    scheduler.add(leader)
    scheduler.add(sibling)
    scheduler.finish(leader)
    assert plan(scheduler.schedule()) == [("a2", 20)]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_finishing_at_any_time_gives_everything_back(steps: int) -> None:
    scheduler = make_scheduler(tokens=8)
    sequence = make_sequence(12)
    scheduler.add(sequence)
    for _ in range(steps):
        compute(scheduler, scheduler.schedule())
    for _ in range(2):
        scheduler.finish(sequence)
        assert not scheduler.has_work
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
        assert scheduler.schedule() == []


def test_starting_over_keeps_the_order_of_arrival() -> None:
    scheduler = make_scheduler()
    for index in range(3):
        scheduler.add(make_sequence(5, str(index), 10 * index))
    compute(scheduler, scheduler.schedule())
    scheduler.add(make_sequence(5, "3", 50))
    scheduler.start_over()
    assert [sequence.request_id for sequence in scheduler.waiting] == ["0", "1", "2", "3"]
    assert not scheduler.running
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert plan(scheduler.schedule()) == [("0", 2), ("1", 2), ("2", 2), ("3", 5)]


@given(
    seed=st.integers(0, 10**6),
    tokens=st.sampled_from([3, 16, 64]),
    seqs=st.integers(1, 5),
    chunked=st.booleans(),
    caching=st.booleans(),
    kinds=st.sampled_from([{0: FULL}, {0: SLIDING}, {0: FULL, 1: SLIDING}]),
    spare=st.integers(0, 10),
)
@settings(max_examples=60, deadline=None)
def test_everybody_finishes_within_budget_and_nothing_is_lost(
    seed: int, tokens: int, seqs: int, chunked: bool, caching: bool, kinds: dict[int, KVSpec], spare: int
) -> None:
    """Random arrivals in a pool that just holds the longest sequence."""
    draw = random.Random(seed)
    longest = 40
    tokens = tokens if chunked else max(tokens, longest)
    blocks = plan_layout(kinds, 4).blocks_for(longest, tokens) + spare
    scheduler = make_scheduler(blocks, seqs=seqs, tokens=tokens, chunked=chunked, caching=caching, specs=kinds)
    goals: dict[Sequence, int] = {}
    waiting = 8
    for _ in range(2000):
        if waiting and draw.random() < 0.3:
            waiting -= 1
            sequence = make_sequence(draw.randint(1, 30), start=draw.choice([0, 0, 1000]))
            goals[sequence] = min(len(sequence) + draw.randint(1, 30), longest)
            scheduler.add(sequence)
        if not scheduler.has_work:
            if not waiting:
                break
            continue
        scheduled = scheduler.schedule()
        assert scheduled
        assert sum(item.num_new for item in scheduled) <= tokens
        assert len(scheduler.running) <= seqs
        ones = [item.num_new == 1 for item in scheduled]
        assert ones == sorted(ones, reverse=True)
        assert all(item.sequence.status is Status.RUNNING for item in scheduled)
        compute(scheduler, scheduled, draw.randrange(50))
        for item in scheduled:
            if len(item.sequence) >= goals[item.sequence]:
                scheduler.finish(item.sequence)
    assert len(goals) == 8
    assert all(sequence.status is Status.FINISHED for sequence in goals)
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable


@pytest.mark.parametrize("cut", range(12))
@pytest.mark.parametrize("method", ["admit", "grow", "release", "holds"])
def test_an_interrupt_anywhere_in_scheduling_leaks_nothing(
    cut: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives before or after any call to the KV manager; then everything can go on, or be dropped."""
    scheduler = make_scheduler(9, seqs=3, tokens=12)
    sequences = [make_sequence(length, str(i), 100 * i) for i, length in enumerate((9, 14, 5, 20))]
    for sequence in sequences:
        scheduler.add(sequence)
    original, calls = getattr(KVManager, method), iter(range(10**6))

    def interrupted(self: KVManager, *args: Any) -> Any:
        after = next(calls) == cut
        result = original(self, *args)
        if after:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(KVManager, method, interrupted)
    for _ in range(6):
        try:
            compute(scheduler, scheduler.schedule())
        except KeyboardInterrupt:
            break
    monkeypatch.undo()
    scheduler.start_over()
    waiting = list(scheduler.waiting)
    assert sorted(s.request_id for s in waiting) == ["0", "1", "2", "3"]
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert len(scheduler.schedule()) > 0
    for sequence in sequences:
        scheduler.finish(sequence)
    assert not scheduler.has_work
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert len(scheduler.kv._free_slots) == 3
