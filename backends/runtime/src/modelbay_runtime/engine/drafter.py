"""Speculative decoding on a rank: tokens guessed by the model's own draft layer, computed along with the sure one.

A draft layer takes what the model made of position p and the token at p + 1, and predicts the token at p + 2; it keeps
keys and values as other layers do. Whatever it says, the sampler decides: its rows of the cache may be stale (those of
a shared prefix's last token are, whose next token differs) without any harm but a guess that is not taken.

Legend: B sequences, R rows, H hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelbay_runtime.api import Step
from modelbay_runtime.engine.batch import Batch, GroupTables, token_positions
from modelbay_runtime.engine.kv_layout import CacheLayout


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of a sequence's last positions from ``start``: their tokens [R] and hidden states [R, H]."""

    start: int
    ids: np.ndarray
    hidden: torch.Tensor

    def until(self, position: int) -> _Kept | None:
        """What comes before ``position``, if it reaches up to it."""
        count = position - self.start
        if not 0 < count <= len(self.ids):
            return None
        return _Kept(self.start, self.ids[:count], self.hidden[:count])

    def joined(self, other: _Kept) -> _Kept:
        return _Kept(self.start, np.concatenate((self.ids, other.ids)), torch.cat((self.hidden, other.hidden)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the draft layer computes of the sequence ``place`` of a batch: ``following`` are the tokens after."""

    place: int
    start: int
    following: np.ndarray
    hidden: torch.Tensor


def _order(rows: _Rows) -> bool:
    """Sequences with one row stand first, as in every step."""
    return len(rows.following) != 1


class Drafter:
    """Args:
    model: with ``draft`` and ``draft_logits``, see `modelbay_runtime.api`.
    prepare: a batch to its step and token ids on the device.
    tokens: most that are guessed at a time. sequences: most that are remembered; the one not seen for longest goes.
    """

    def __init__(
        self,
        model: Any,
        layout: CacheLayout,
        prepare: Callable[[Batch], tuple[Step, torch.Tensor]],
        vocab_size: int,
        tokens: int,
        sequences: int,
    ) -> None:
        self._model, self._layout, self._prepare = model, layout, prepare
        self._vocab_size, self._tokens, self._sequences = vocab_size, tokens, sequences
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()

    def guess(self, batch: Batch) -> tuple[Batch, dict[int, list[int]]]:
        """The batch with its draft tokens filled in, and those by place."""
        rows = []
        begins = batch.ends - batch.new
        for place in np.flatnonzero(batch.drafts).tolist():
            kept = self._kept.pop(batch.owners[place], None)
            before = None if kept is None else kept.until(int(batch.starts[place]))
            if before is not None:
                following = np.append(before.ids[1:], batch.input_ids[begins[place]])
                rows.append(_Rows(place, before.start, following, before.hidden))
        if not rows:
            return batch, {}
        rows.sort(key=_order)
        ends = np.cumsum([len(row.following) for row in rows]) - 1
        hidden = self._run(batch, rows)
        last = hidden.index_select(0, torch.from_numpy(ends).to(hidden.device))
        tokens = self._model.draft_logits(last)[:, : self._vocab_size].argmax(-1).tolist()
        ids, drafts = batch.input_ids.copy(), {}
        for row, token in zip(rows, tokens, strict=True):
            ids[begins[row.place] + 1] = token
            drafts[row.place] = [token]
        return replace(batch, input_ids=ids), drafts

    def keep(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Take what the model made of the batch's tokens, [T, H]: the draft layer computes all but the last, whose
        following tokens are not sure."""
        rows = []
        for place in batch.speculating:
            end, new, start = int(batch.ends[place]), int(batch.new[place]), int(batch.starts[place])
            found = _Kept(start, batch.input_ids[end - new : end], hidden[end - new : end])
            earlier = self._kept.pop(batch.owners[place], None)
            before = None if earlier is None else earlier.until(start)
            if before is not None:
                found = before.joined(found)
            sure = len(found.ids) - self._tokens - 1
            if sure > 0:
                rows.append(_Rows(place, found.start, found.ids[1 : sure + 1], found.hidden[:sure]))
                found = _Kept(found.start + sure, found.ids[sure:], found.hidden[sure:])
            self._kept[batch.owners[place]] = replace(found, hidden=found.hidden.clone())
        while len(self._kept) > self._sequences:
            self._kept.popitem(last=False)
        if rows:
            self._run(batch, sorted(rows, key=_order))

    def _run(self, batch: Batch, rows: Sequence[_Rows]) -> torch.Tensor:
        """The draft layer's hidden states, [sum of R, H], for rows in the order of a step."""
        places = np.array([row.place for row in rows])
        starts = np.array([row.start for row in rows], np.int64)
        new = np.array([len(row.following) for row in rows], np.int64)
        tables = zip(self._layout.groups, batch.groups, strict=True)
        own = Batch(
            owners=tuple(batch.owners[place] for place in places),
            starts=starts,
            lengths=starts + new,
            input_ids=np.concatenate([row.following for row in rows]),
            groups=tuple(_tables(group.block_size or 1, table, places, starts, new) for group, table in tables),
        )
        step, ids = self._prepare(own)
        return self._model.draft(torch.cat([row.hidden for row in rows]), ids, step.positions, step)


def _tables(
    block_size: int, of_batch: GroupTables, places: np.ndarray, starts: np.ndarray, new: np.ndarray
) -> GroupTables:
    """Those of some of a batch's sequences, for other positions of theirs."""
    tables, first = of_batch.tables[places], of_batch.first[places]
    sequence, positions = np.repeat(np.arange(len(places)), new), token_positions(starts, new)
    within = positions - first[sequence]
    column = np.clip(within // block_size, 0, tables.shape[1] - 1)
    slots = tables[sequence, column].astype(np.int64) * block_size + within % block_size
    return GroupTables(tables, first, slots)
