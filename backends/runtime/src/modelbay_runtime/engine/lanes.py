"""Lanes: what each replica of a model holds on the host, and which of them a new request goes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.scheduler import Scheduled, Scheduler
from modelbay_runtime.engine.sequence import Sequence


@dataclass(slots=True)
class Lane:
    """One replica's block tables and queue.

    Attributes:
        given_up: requests to pool of which its pooler may keep something, until its next batch says so.
    """

    kv: KVManager
    scheduler: Scheduler
    given_up: list[str] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Tokens that are still to be computed, and one for each sequence: how much stands before a newcomer."""
        waiting = self.scheduler.waiting
        return sum(len(sequence) for sequence in waiting) + sum(
            max(len(sequence) - sequence.num_computed, 1) for sequence in self.scheduler.running
        )


def choose_lane(lanes: list[Lane], sequence: Sequence) -> int:
    """The lane where this sequence has least to wait for: what stands before it, and its own tokens but for those that
    the lane's prefix cache holds. Of equals the first."""
    if len(lanes) == 1:
        return 0
    costs = [lane.load + len(sequence) - _cached(lane, sequence) for lane in lanes]
    return costs.index(min(costs))


def _cached(lane: Lane, sequence: Sequence) -> int:
    kv = lane.kv
    return kv.longest_prefix(sequence) if kv.prefix_caching and sequence.reads_prefix_cache else 0


def under_way(scheduled: list[Scheduled], flag: bool) -> None:
    """Mark sequences as being computed, or as done with it."""
    for item in scheduled:
        item.sequence.in_flight = flag
