"""Blocks: reference counts, a free list in order of last use, and a table of blocks whose content is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

#: Never handed out; stands in block tables where a window has slid past.
NULL_BLOCK = 0


class BlockPool:
    """``num_blocks`` blocks, one of them the null block.

    A freed block keeps its content and its key until it is handed out again, so a later request that begins alike
    can take it back; the least recently freed goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._key_of: dict[int, Hashable] = {}
        self._block_of: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """``count`` blocks of unknown content. The caller has checked `num_free`."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._references[block] = 1
            taken.append(block)
        return taken

    def lookup(self, key: Hashable) -> int | None:
        """The block with this content, held by somebody or free."""
        return self._block_of.get(key)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each block (the null block is nobody's)."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less; blocks that nobody holds become free, in the order given."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than it was held"
            if not self._references[block]:
                self._free[block] = None

    def publish(self, block: int, key: Hashable) -> None:
        """This block's content is complete and known by ``key``; the first block with a key keeps it."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self) -> None:
        """No content is known any more; blocks that are held stay so."""
        self._key_of.clear()
        self._block_of.clear()
