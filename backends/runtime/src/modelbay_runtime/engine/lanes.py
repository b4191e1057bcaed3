"""Lanes: what each replica of a model holds on the host, and which of them a new request goes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from modelbay_runtime.engine.block_pool import BlockPool
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.memory import step_tokens
from modelbay_runtime.engine.rank import Rank
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


def make_lane(rank: Rank, depth: int) -> Lane:
    """An empty one, for the cache that all ranks agreed on. ``depth``: rounds under way at a time."""
    args, plan, drafts = rank.resolution.args, rank.plan, rank.built.context.draft_tokens
    pool = BlockPool(plan.budget.num_blocks)
    kv = KVManager(plan.layout, pool, args.max_num_seqs, plan.max_model_len, args.enable_prefix_caching)
    if not plan.layout.groups:
        # Nothing is kept, so a token sees the later ones too: all of its sequence must be in one step.
        args = args.replace(enable_chunked_prefill=False)
    tokens, chunked = step_tokens(args, plan.max_model_len), args.enable_chunked_prefill
    return Lane(kv, Scheduler(kv, args.max_num_seqs, tokens, chunked, depth, drafts, plan.max_model_len))


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
