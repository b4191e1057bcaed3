"""One step on the device: from scheduled sequences to logits.

Legend: T tokens of the step, B sequences, R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from modelbay_runtime.api import KVGroupStep, Step
from modelbay_runtime.build import BuiltModel
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.scheduler import Scheduled
from modelbay_runtime.engine.sequence import Sequence

#: Rows of prompt logits that are made at once: [rows, V] in float32 stays within a few hundred MB.
_PROMPT_ROWS = 256


@dataclass(slots=True)
class StepOutput:
    """``logits`` [R, V] belong to ``sampled``, row by row; ``hidden`` [T, H] to all tokens.

    ``begin`` is where each scheduled sequence's tokens begin in ``hidden``.
    """

    sampled: list[Sequence]
    logits: torch.Tensor | None
    hidden: torch.Tensor
    begin: dict[Sequence, int] = field(default_factory=dict)


class Runner:
    """Owns the model and its cache."""

    def __init__(self, built: BuiltModel, kv: KVManager, cache: KVCache) -> None:
        self.model = built.module
        self.device = built.context.device
        self.kv = kv
        self.cache = cache
        self._group_of = {layer: index for index, group in enumerate(kv.layout.groups) for layer in group.layers}

    @torch.inference_mode()
    def run(self, scheduled: list[Scheduled]) -> StepOutput:
        """Compute the scheduled tokens and the logits of those sequences whose last token was reached."""
        step, input_ids = self._prepare(scheduled)
        hidden = self.model(input_ids, step.positions, step)
        ends = np.cumsum(step.query_lens)
        rows = [int(ends[i]) - 1 for i, item in enumerate(scheduled) if item.samples]
        sampled = [item.sequence for item in scheduled if item.samples]
        begin = {item.sequence: int(ends[i]) - item.num_new for i, item in enumerate(scheduled)}
        if not rows:
            return StepOutput(sampled, None, hidden, begin)
        everything = len(rows) == hidden.shape[0]
        picked = hidden if everything else hidden.index_select(0, torch.tensor(rows, device=self.device))
        return StepOutput(sampled, self.model.logits(picked), hidden, begin)

    @torch.inference_mode()
    def prompt_logits(self, hidden: torch.Tensor):
        """Logits of many rows, a few at a time: yields (first row, [rows, V])."""
        for first in range(0, hidden.shape[0], _PROMPT_ROWS):
            yield first, self.model.logits(hidden[first : first + _PROMPT_ROWS])

    def _prepare(self, scheduled: list[Scheduled]) -> tuple[Step, torch.Tensor]:
        query_lens = [item.num_new for item in scheduled]
        starts = np.array([item.sequence.num_computed for item in scheduled], np.int64)
        new = np.array(query_lens, np.int64)
        lengths = starts + new
        num_decodes = sum(1 for count in query_lens if count == 1)
        query_start = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(new, out=query_start[1:])
        # Position of each token: its sequence's start plus its distance from the sequence's first row.
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], new)
        input_ids = np.concatenate(
            [
                np.array(item.sequence.token_ids[s:e], np.int64)
                for item, s, e in zip(scheduled, starts, lengths, strict=True)
            ]
        )
        slots = np.array([item.sequence.slot for item in scheduled], np.int64)
        step = Step(
            positions=self._tensor(positions),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(lengths.astype(np.int32)),
            query_lens=query_lens,
            context_lens=lengths.tolist(),
            num_decodes=num_decodes,
            caches=self.cache.views,
        )
        groups = self._groups(slots, np.repeat(slots, new), starts, lengths, positions)
        step.groups = {layer: groups[index] for layer, index in self._group_of.items()}
        return step, self._tensor(input_ids)

    def _groups(
        self, slots: np.ndarray, token_slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, positions: np.ndarray
    ) -> list[KVGroupStep]:
        groups = []
        for index, group in enumerate(self.kv.layout.groups):
            tables, first = self.kv.tables(index, slots, starts, lengths)
            groups.append(
                KVGroupStep(
                    slots=self._tensor(self.kv.slot_mapping(index, token_slots, positions)),
                    block_tables=self._tensor(tables),
                    first_position=self._tensor(first.astype(np.int32)),
                    block_size=group.block_size or 1,
                )
            )
        return groups

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
