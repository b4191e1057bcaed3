"""Which sequence holds which blocks: allocation, prefix reuse, windows that slide, and the tables a step is made of.

Legend: B sequences of a step, M blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from modelbay_runtime.engine.block_pool import NULL_BLOCK, BlockPool
from modelbay_runtime.engine.kv_layout import CacheLayout, KVGroup
from modelbay_runtime.engine.sequence import Sequence


@dataclass(slots=True)
class _Holding:
    """The blocks of one sequence in one group. ``first``: entries before it slid out of the window."""

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    published: int = 0


class KVManager:
    """Block tables for up to ``max_seqs`` running sequences.

    Args:
        max_model_len: longest sequence, in tokens; sizes the tables.
        prefix_caching: look prompts up among blocks whose content is known.
    """

    def __init__(
        self, layout: CacheLayout, pool: BlockPool, max_seqs: int, max_model_len: int, prefix_caching: bool
    ) -> None:
        self.layout = layout
        self.pool = pool
        # A state is not made of blocks that could be shared: where one exists, nothing is looked up.
        self.prefix_caching = prefix_caching and all(group.block_size is not None for group in layout.groups)
        self._holdings: dict[Sequence, list[_Holding]] = {}
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._tables = [
            np.zeros((max_seqs, 1 if group.block_size is None else -(-max_model_len // group.block_size)), np.int32)
            for group in layout.groups
        ]

    # ---- admission -------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a table row and whatever of its prefix is cached; False if no row is free."""
        if not self._free_slots:
            return False
        holdings = [_Holding() for _ in self.layout.groups]
        self._holdings[sequence] = holdings
        sequence.slot = self._free_slots.pop()
        if self.prefix_caching and sequence.reads_prefix_cache:
            self._take_prefix(sequence, holdings)
        return True

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence has a row (admitted, and not released since)."""
        return sequence in self._holdings

    def _take_prefix(self, sequence: Sequence, holdings: list[_Holding]) -> None:
        hit = self.longest_prefix(sequence)
        for group, holding, table in zip(self.layout.groups, holdings, self._tables, strict=True):
            assert group.block_size is not None
            count = hit // group.block_size
            holding.first = _first_block(group, hit)
            found = [self._find(group, sequence, i) for i in range(holding.first, count)]
            holding.blocks = [NULL_BLOCK] * holding.first + [block for block in found if block is not None]
            assert len(holding.blocks) == count, "a prefix that was found a moment ago is gone"
            holding.published = count
            self.pool.hold(holding.blocks)
            table[sequence.slot, :count] = holding.blocks
        sequence.num_computed = hit
        if sequence.num_cached is None:
            sequence.num_cached = hit

    def longest_prefix(self, sequence: Sequence) -> int:
        """Tokens at the beginning whose rows every group still has; at least one token is left to compute."""
        groups = [(group, group.block_size) for group in self.layout.groups if group.block_size is not None]
        if not groups:
            return 0
        step = math.lcm(*(block_size for _, block_size in groups))
        limit = (len(sequence) - 1) // step * step
        for group, block_size in groups:
            if group.spec.window is None:
                count = 0
                while (count + 1) * block_size <= limit and self._find(group, sequence, count) is not None:
                    count += 1
                limit = count * block_size // step * step
        windows = [group for group, _ in groups if group.spec.window is not None]
        limit = _outside_spans(sequence, limit, step)
        while limit and not all(self._window_is_cached(group, sequence, limit) for group in windows):
            limit = _outside_spans(sequence, limit - step, step)
        return limit

    def _window_is_cached(self, group: KVGroup, sequence: Sequence, tokens: int) -> bool:
        assert group.block_size is not None
        needed = range(_first_block(group, tokens), tokens // group.block_size)
        return all(self._find(group, sequence, i) is not None for i in needed)

    def _find(self, group: KVGroup, sequence: Sequence, block_index: int) -> int | None:
        assert group.block_size is not None
        return self.pool.lookup((self.layout.groups.index(group), sequence.digests(group.block_size)[block_index]))

    # ---- growth ----------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_new: int) -> bool:
        """Hold blocks for ``num_new`` more tokens; False (and nothing changed but windows) if there are too few."""
        holdings = self._holdings[sequence]
        self._slide(sequence, holdings)
        wanted = []
        for group, holding in zip(self.layout.groups, holdings, strict=True):
            total = 1 if group.block_size is None else -(-(sequence.num_computed + num_new) // group.block_size)
            wanted.append(max(0, total - len(holding.blocks)))
        if sum(wanted) > self.pool.num_free:
            return False
        for holding, table, count in zip(holdings, self._tables, wanted, strict=True):
            if count:
                have = len(holding.blocks)
                holding.blocks += self.pool.take(count)
                table[sequence.slot, have : have + count] = holding.blocks[have:]
        return True

    def _slide(self, sequence: Sequence, holdings: list[_Holding]) -> None:
        """Give back blocks that no later query of this sequence can see."""
        for group, holding, table in zip(self.layout.groups, holdings, self._tables, strict=True):
            if group.spec.window is None:
                continue
            first = min(_first_block(group, sequence.num_computed), len(holding.blocks))
            if first > holding.first:
                self.pool.release(holding.blocks[holding.first : first])
                holding.blocks[holding.first : first] = [NULL_BLOCK] * (first - holding.first)
                table[sequence.slot, holding.first : first] = NULL_BLOCK
                holding.first = first

    def publish(self, sequence: Sequence) -> None:
        """Blocks that are full up to ``num_computed`` become findable."""
        if not self.prefix_caching:
            return
        for index, (group, holding) in enumerate(zip(self.layout.groups, self._holdings[sequence], strict=True)):
            assert group.block_size is not None
            full = sequence.num_computed // group.block_size
            if full <= holding.published:
                continue
            digests = sequence.digests(group.block_size)
            for i in range(max(holding.published, holding.first), full):
                self.pool.publish(holding.blocks[i], (index, digests[i]))
            holding.published = full

    def release(self, sequence: Sequence) -> None:
        """The sequence is done or preempted: its row and blocks are free (their content stays findable)."""
        for holding in self._holdings.pop(sequence):
            # Last blocks first: the beginning of a prompt is what others are likely to share.
            self.pool.release(reversed(holding.blocks[holding.first :]))
        if sequence.slot < 0:  # admission was cut short before it got a row
            return
        for table in self._tables:
            # Whoever is padded with the rest of this row must not read blocks that are another's by then.
            table[sequence.slot] = NULL_BLOCK
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    # ---- a step's tables -------------------------------------------------------------------------------------------

    def tables(
        self, group_index: int, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Block tables [B, M] and the position of each table's first token [B].

        Args:
            slots: table rows [B]. starts: position of each sequence's first new token [B]. lengths: [B], with new ones.
        """
        group, table = self.layout.groups[group_index], self._tables[group_index]
        if group.block_size is None:
            return table[slots], np.zeros_like(slots)
        if group.spec.window is None:
            width = -(-int(lengths.max()) // group.block_size)
            return table[slots, :width], np.zeros_like(slots)
        first = np.maximum(starts - group.spec.window + 1, 0) // group.block_size
        width = int((-(-lengths // group.block_size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), table.shape[1] - 1)
        return table[slots[:, None], columns], first * group.block_size

    def slot_mapping(self, group_index: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[T] where each token's row goes. rows: [T] table row of each token's sequence."""
        block_size = self.layout.groups[group_index].block_size
        if block_size is None:
            return self._tables[group_index][rows, 0].astype(np.int64)
        blocks = self._tables[group_index][rows, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size


def _outside_spans(sequence: Sequence, tokens: int, step: int) -> int:
    """``tokens``, or fewer, so that no span which one step must compute is torn."""
    while sequence.media is not None and sequence.media.cut(tokens) != tokens:
        tokens = sequence.media.cut(tokens) // step * step
    return tokens


def _first_block(group: KVGroup, num_computed: int) -> int:
    """The first block that the query at position ``num_computed`` can see."""
    if group.spec.window is None or group.block_size is None:
        return 0
    return max(0, num_computed - group.spec.window + 1) // group.block_size
