"""A cache for a few sequences and the steps over it, without an engine: every sequence has its blocks from the start.

Legend: T tokens of the step, P rows of positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelbay_runtime.api import KVGroupStep, KVSpec, Step
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_layout import plan_layout

_NOTHING = torch.zeros(0, dtype=torch.int64)


class SmallCache:
    """Args:
    lengths: how long each sequence becomes at most, in tokens.
    block_size: tokens in a block of the widest layer.
    """

    def __init__(
        self, kv_specs: Mapping[int, KVSpec], lengths: Sequence[int], dtype: torch.dtype, block_size: int = 4
    ) -> None:
        self.layout = plan_layout(dict(kv_specs), block_size)
        self.tables: list[torch.Tensor] = []
        used = 1  # block 0 is nobody's
        for group in self.layout.groups:
            needed = [-(-length // (group.block_size or length)) for length in lengths]
            table = torch.zeros(len(lengths), max(needed, default=1), dtype=torch.int32)
            for row, count in enumerate(needed):
                table[row, :count] = torch.arange(used, used + count, dtype=torch.int32)
                used += count
            self.tables.append(table)
        self.caches = KVCache(self.layout, used, dtype, torch.device("cpu")).views

    def step(self, parts: Sequence[tuple[int, int, int]], positions: torch.Tensor | None = None, **more: Any) -> Step:
        """The step that computes these parts of sequences, decodes first.

        Args:
            parts: (number of the sequence, begin, end).
            positions: [T] or [P, T]; each token's place in its sequence, if not given.
            more: other attributes of the step.
        """
        lengths = [end - begin for _, begin, end in parts]
        places = [torch.arange(begin, end) for _, begin, end in parts]
        decodes = next((at for at, length in enumerate(lengths) if length != 1), len(lengths))
        if positions is None:
            positions = torch.cat([_NOTHING, *places])
        return Step(
            positions=positions,
            query_start=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor([end for *_, end in parts], dtype=torch.int32),
            query_lens=lengths,
            context_lens=[end for *_, end in parts],
            num_decodes=decodes,
            caches=self.caches,
            groups=self._groups([row for row, *_ in parts], places),
            **more,
        )

    def _groups(self, rows: Sequence[int], places: Sequence[torch.Tensor]) -> dict[int, KVGroupStep]:
        found: dict[int, KVGroupStep] = {}
        for group, table in zip(self.layout.groups, self.tables, strict=True):
            size = group.block_size or 1
            slots = [table[row, at // size].long() * size + at % size for row, at in zip(rows, places, strict=True)]
            step = KVGroupStep(
                slots=torch.cat([_NOTHING, *slots]),
                block_tables=table[torch.tensor(rows, dtype=torch.int64)],
                first_position=torch.zeros(len(rows), dtype=torch.int32),
                block_size=size,
            )
            found |= dict.fromkeys(group.layers, step)
        return found
