"""Which sequences get guesses in a step: in the room that is left, and never beyond what could be kept."""

from __future__ import annotations

from modelbay_runtime.engine.batch import make_batch
from modelbay_runtime.engine.block_pool import BlockPool
from modelbay_runtime.engine.kv_layout import plan_layout
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.sampling_state import SamplingState
from modelbay_runtime.engine.scheduler import Scheduled, Scheduler
from modelbay_runtime.engine.sequence import Sequence
from modelbay_runtime.kv_spec import FullKV
from modelbay_runtime.sampling_params import SamplingParams


def scheduler(blocks: int = 64, tokens: int = 32, max_model_len: int = 64, block_size: int = 4) -> Scheduler:
    layout = plan_layout({0: FullKV(1, 4, 4)}, block_size)
    kv = KVManager(layout, BlockPool(blocks + 1), 8, max_model_len, True)
    return Scheduler(kv, 8, tokens, True, num_drafts=1, max_model_len=max_model_len)


def add(to: Scheduler, length: int, name: str, **params: int) -> Sequence:
    output: list[int] = []
    state = SamplingState(SamplingParams(**params), output, name)  # type: ignore[arg-type]
    start = 100 * ord(name)
    sequence = Sequence(name, 0, length, list(range(start, start + length)), output, state, speculates=True)
    to.add(sequence)
    return sequence


def step(of: Scheduler, *, right: bool = False) -> list[tuple[str, int, int]]:
    """Schedule, and do what the engine does with what comes back."""
    scheduled = of.schedule()
    batch = make_batch(scheduled, of.kv)
    assert len(batch.input_ids) == batch.new.sum() == sum(item.num_new for item in scheduled)
    assert [int(batch.new[place]) for place in batch.sampled] == [i.num_new for i in scheduled if i.samples]
    for item in scheduled:
        take(of, item, right)
    return sorted((item.sequence.request_id, item.num_new, item.num_drafts) for item in scheduled)


def take(of: Scheduler, item: Scheduled, right: bool) -> None:
    samples = item.samples
    item.sequence.num_computed += item.num_new - item.num_drafts
    of.kv.publish(item.sequence)
    item.sequence.drafts_next = True
    if samples:
        item.sequence.append(7)
    if right and item.num_drafts:
        item.sequence.append(8)
        item.sequence.num_computed += 1


def test_a_guess_from_the_second_step_on() -> None:
    plan = scheduler()
    sequence = add(plan, 5, "a", max_tokens=6)
    assert step(plan) == [("a", 5, 0)]
    assert step(plan) == [("a", 2, 1)]  # wrong: the token behind it is computed again
    assert sequence.num_computed == 6
    assert step(plan, right=True) == [("a", 2, 1)]
    assert (sequence.num_computed, len(sequence)) == (8, 9)
    assert step(plan) == [("a", 2, 1)]
    assert step(plan) == [("a", 1, 0)], "a guess could only be a token beyond max_tokens"


def test_tokens_that_are_sure_come_first() -> None:
    plan = scheduler(tokens=5)
    add(plan, 2, "a")
    add(plan, 2, "b")
    step(plan)
    assert step(plan) == [("a", 2, 1), ("b", 2, 1)]
    add(plan, 20, "c")
    assert step(plan) == [("a", 1, 0), ("b", 1, 0), ("c", 3, 0)]
    assert step(plan) == [("a", 1, 0), ("b", 1, 0), ("c", 3, 0)]


def test_no_block_is_taken_from_another_sequence_for_a_guess() -> None:
    plan = scheduler(blocks=2)
    add(plan, 4, "a")
    add(plan, 3, "b")
    assert step(plan) == [("a", 4, 0), ("b", 3, 0)]
    # a's next token needs a block and there is none: b, the later, goes; b would have had room for its token.
    assert step(plan) == [("a", 2, 1)]
    full = scheduler(blocks=2, block_size=4)
    add(full, 3, "a")
    add(full, 3, "b")
    step(full)
    assert step(full) == [("a", 1, 0), ("b", 1, 0)], "both guesses would begin a block"
    assert full.num_preemptions == 0


def test_no_guess_beyond_the_longest_sequence() -> None:
    plan = scheduler(max_model_len=8)
    add(plan, 5, "a")
    assert [step(plan) for _ in range(4)] == [[("a", 5, 0)], [("a", 2, 1)], [("a", 2, 1)], [("a", 1, 0)]]


def test_a_preempted_sequence_starts_without() -> None:
    """What a guess is made of is not there any more, or of another position."""
    plan = scheduler()
    sequence = add(plan, 5, "a")
    step(plan)
    step(plan)
    plan.preempt(sequence)
    assert not sequence.drafts_next
    [(_, _, drafts)] = step(plan)
    assert drafts == 0
    assert step(plan) == [("a", 2, 1)]
