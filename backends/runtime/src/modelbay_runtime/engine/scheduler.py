"""Continuous batching: who runs in the next step, with how many tokens.

Every sequence simply has tokens that are not computed yet: a whole prompt, a chunk of one, or the one token that was
sampled last. Running sequences come first, in order of arrival; then waiting ones, while tokens, rows and blocks last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from modelbay.errors import EngineError
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence and how many of its tokens this step computes, the last ``num_drafts`` of which are guesses."""

    sequence: Sequence
    num_new: int
    num_drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether this step reaches the sequence's last token, and the next one is to be drawn."""
        return self.sequence.sampling is not None and self.completes

    @property
    def completes(self) -> bool:
        """Whether this step reaches the sequence's last token."""
        return self.sequence.num_computed + self.num_new - self.num_drafts == len(self.sequence)


class Scheduler:
    """Args:
    max_batched_tokens: most tokens in a step.
    chunked_prefill: whether a prompt may be computed over several steps.
    depth: how many steps are under way at a time. A sequence is in one of them, so each takes its share of them all.
    num_drafts: most tokens that are guessed for a sequence in one step. max_model_len: longest sequence then.
    """

    def __init__(
        self,
        kv: KVManager,
        max_seqs: int,
        max_batched_tokens: int,
        chunked_prefill: bool,
        depth: int = 1,
        num_drafts: int = 0,
        max_model_len: int = 0,
    ) -> None:
        self.kv = kv
        self.max_seqs = max_seqs
        self.max_batched_tokens = max_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.depth = depth
        self.num_drafts, self.max_model_len = num_drafts, max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """The next step; sequences with one new token first. Empty only if nothing is left to do, or nothing that is
        not under way.

        Raises:
            EngineError: the pool is too small for a single sequence.
        """
        budget = self.max_batched_tokens
        scheduled: list[Scheduled] = []
        preempted = False
        position = 0
        share = -(-(len(self.running) + len(self.waiting)) // self.depth)
        while position < len(self.running) and budget and len(scheduled) < share:
            sequence = self.running[position]
            wanted = 0 if sequence.in_flight else self._tokens(sequence, budget)
            if not wanted:
                position += 1
                continue
            fits, victims = self._make_room(sequence, wanted)
            preempted = preempted or victims > 0
            if not fits:
                break
            scheduled.append(Scheduled(sequence, wanted))
            budget -= wanted
            position += 1
        if not preempted:
            self._admit(scheduled, budget, share)
        if not scheduled and self.has_work and not any(sequence.in_flight for sequence in self.running):
            raise EngineError(
                f"the KV cache ({self.kv.pool.num_usable} blocks) cannot hold one sequence of "
                f"{len((self.running or self.waiting)[0])} tokens.",
                hint="Give it more memory (kv_cache_memory_bytes) or a smaller max_model_len.",
            )
        if self.num_drafts:
            scheduled = self._with_drafts(scheduled)
        scheduled.sort(key=lambda item: item.num_new != 1)
        return scheduled

    def _tokens(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of this sequence fit the budget; 0 if it must wait for a step with more room."""
        wanted = len(sequence) - sequence.num_computed
        if wanted > budget and not self.chunked_prefill:
            return 0
        if sequence.media is not None:
            return sequence.media.cut(sequence.num_computed + min(wanted, budget)) - sequence.num_computed
        return min(wanted, budget)

    def _with_drafts(self, scheduled: list[Scheduled]) -> list[Scheduled]:
        """Guesses behind last tokens, in the room that the tokens which are sure have left."""
        budget = self.max_batched_tokens - sum(item.num_new for item in scheduled)
        found = []
        for item in scheduled:
            drafts = self._drafts(item.sequence, budget) if item.num_new == 1 and item.completes else 0
            budget -= drafts
            found.append(Scheduled(item.sequence, item.num_new + drafts, drafts))
        return found

    def _drafts(self, sequence: Sequence, budget: int) -> int:
        if not sequence.drafts_next or sequence.sampling is None:
            return 0
        count = min(self.num_drafts, budget, self.max_model_len - len(sequence))
        if (limit := sequence.sampling.params.max_tokens) is not None:
            count = min(count, limit - len(sequence.output_ids) - 1)
        return count if count > 0 and self.kv.grow(sequence, 1 + count) else 0

    def _make_room(self, sequence: Sequence, wanted: int) -> tuple[bool, int]:
        """Blocks for a running sequence, preempting the latest arrivals.

        Returns:
            Whether it has them (not if it had to go itself, or must wait for one that is under way), and how many were
            preempted.
        """
        victims = 0
        while not self.kv.grow(sequence, wanted):
            victim = self.running[-1]
            if victim.in_flight:
                return False, victims
            self.preempt(victim)
            victims += 1
            if victim is sequence:
                return False, victims
        return True, victims

    def _admit(self, scheduled: list[Scheduled], budget: int, share: int) -> None:
        for sequence in list(self.waiting):
            if not budget or len(self.running) >= self.max_seqs or len(scheduled) >= share:
                break
            if self._waits_for_leader(sequence):
                continue
            if not self.kv.admit(sequence):
                break
            wanted = self._tokens(sequence, budget)
            if not wanted or not self.kv.grow(sequence, wanted):
                self.kv.release(sequence)
                sequence.num_computed = 0
                break
            self.running.append(sequence)
            self.waiting.remove(sequence)
            sequence.status = Status.RUNNING
            scheduled.append(Scheduled(sequence, wanted))
            budget -= wanted

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """A sibling waits until the prompt that it shares is computed, and then finds it in the prefix cache."""
        leader = sequence.leader
        if leader is None or not self.kv.prefix_caching:
            return False
        return leader.status is not Status.FINISHED and leader.in_prefill

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it starts over from its tokens, prompt and output, when there is room."""
        self.waiting.appendleft(sequence)  # first: an interrupt in between must not lose it
        self._take_back(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def start_over(self) -> None:
        """Nothing runs, the first arrival stands in front: a step was cut short, and what it wrote is not known.

        It may have been cut short anywhere, as by Ctrl-C, so what a sequence holds is asked of the KV manager.
        """
        for sequence in list(reversed(self.running)):
            if sequence not in self.waiting:
                self.waiting.appendleft(sequence)
        for sequence in self.waiting:
            self._take_back(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done, by itself or because the caller does not want it any more."""
        self._take_back(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def _take_back(self, sequence: Sequence) -> None:
        """Out of the running, and its row and blocks are free, whatever state it was in."""
        if sequence in self.running:
            self.running.remove(sequence)
        if self.kv.holds(sequence):
            self.kv.release(sequence)
        if sequence.status is not Status.FINISHED:
            sequence.status = Status.WAITING
        sequence.in_flight = sequence.drafts_next = False
        sequence.num_computed = 0
