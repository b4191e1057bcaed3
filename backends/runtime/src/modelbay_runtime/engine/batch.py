"""One step's work as plain data: what every rank must know to compute it. Made where requests are, sent to all.

Legend: T tokens of the step, B sequences, M blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from modelbay_runtime.engine.kv_layout import CacheLayout
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.scheduler import Scheduled
from modelbay_runtime.multimodal.batch import BatchMedia, batch_media
from modelbay_runtime.pooling.chunks import chunks_of, token_types_of
from modelbay_runtime.pooling.reduce import Chunk

if TYPE_CHECKING:
    from modelbay_runtime.engine.request import Request


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows ``begin`` to ``end`` of the step's tokens, whose logits say how likely the prompt's next tokens were.

    ``sequence``: place in the batch. ``targets``: those tokens. ``k``: how many of the likeliest are wanted.
    """

    sequence: int
    begin: int
    end: int
    targets: tuple[int, ...]
    k: int


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Of one KV group: block tables [B, M], position of each table's first token [B], slots of the new rows [T]."""

    tables: np.ndarray
    first: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that decode stand first.

    Attributes:
        owners: (request id, index) of each sequence.
        starts: position of each sequence's first new token [B].
        lengths: with the new tokens [B].
        input_ids: [T].
        groups: in the order of the cache layout's groups.
        sampled: sequences (by place) whose last row's logits are wanted.
        chunks: tokens of sequences whose hidden states are pooled. forget: requests to pool that were given up.
        token_types: [T], the number of each token's text in pairs of texts; None if all are 0.
        drafts: how many of each sequence's last tokens are guesses yet to be made [B].
        speculating: sequences (by place) of which later steps may make guesses.
        media: images and audio of which this step has tokens, and positions that they change.
    """

    owners: tuple[tuple[str, int], ...]
    starts: np.ndarray
    lengths: np.ndarray
    input_ids: np.ndarray
    groups: tuple[GroupTables, ...]
    sampled: tuple[int, ...] = ()
    prompt_rows: tuple[PromptRows, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    forget: tuple[str, ...] = ()
    token_types: np.ndarray | None = None
    media: BatchMedia | None = None
    drafts: tuple[int, ...] = ()
    speculating: tuple[int, ...] = ()
    new: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "new", self.lengths - self.starts)

    @property
    def ends(self) -> np.ndarray:
        """One past each sequence's last row [B]."""
        return np.cumsum(self.new)

    def sampled_rows(self) -> np.ndarray:
        """The rows whose logits are wanted: of each sequence that is sampled the last, and one more for each draft."""
        ends = self.ends[list(self.sampled)]
        if not any(self.drafts):
            return ends - 1
        begins = ends - 1 - np.array(self.drafts)[list(self.sampled)]
        return np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])

    @property
    def num_decodes(self) -> int:
        return int((self.new == 1).sum())


def make_batch(
    scheduled: SequenceOf[Scheduled],
    kv: KVManager,
    prompt_rows: SequenceOf[PromptRows] = (),
    forget: SequenceOf[str] = (),
    epoch: int = 0,
) -> Batch:
    """The batch of scheduled sequences, at least one, as they stand now. ``epoch``: see `BatchMedia`."""
    starts = np.array([item.sequence.num_computed for item in scheduled], np.int64)
    new = np.array([item.num_new for item in scheduled], np.int64)
    lengths = starts + new
    slots = np.array([item.sequence.slot for item in scheduled], np.int64)
    ids = [
        np.array(item.sequence.token_ids[s:e], np.int64) for item, s, e in zip(scheduled, starts, lengths, strict=True)
    ]
    token_slots, positions = np.repeat(slots, new), token_positions(starts, new)
    groups = []
    for index in range(len(kv.layout.groups)):
        tables, first = kv.tables(index, slots, starts, lengths)
        groups.append(GroupTables(tables, first, kv.slot_mapping(index, token_slots, positions)))
    if any(item.num_drafts for item in scheduled):
        ids = [np.pad(each, (0, item.num_drafts)) for each, item in zip(ids, scheduled, strict=True)]
    return Batch(
        owners=tuple((item.sequence.request_id, item.sequence.index) for item in scheduled),
        starts=starts,
        lengths=lengths,
        input_ids=np.concatenate(ids),
        groups=tuple(groups),
        sampled=tuple(i for i, item in enumerate(scheduled) if item.samples),
        prompt_rows=tuple(prompt_rows),
        chunks=chunks_of(scheduled),
        forget=tuple(forget),
        token_types=token_types_of(scheduled),
        drafts=tuple(item.num_drafts for item in scheduled),
        speculating=tuple(i for i, item in enumerate(scheduled) if item.sequence.speculates),
        media=batch_media(
            [item.sequence.request_id for item in scheduled],
            [item.sequence.media for item in scheduled],
            starts,
            lengths,
            epoch,
        ),
    )


def prompt_rows(scheduled: SequenceOf[Scheduled], requests: Mapping[str, Request]) -> list[PromptRows]:
    """Which rows of a step say how likely the prompt's tokens were, of requests that want to know."""
    wanted, begin = [], 0
    for place, item in enumerate(scheduled):
        sequence = item.sequence
        k = requests[sequence.request_id].prompt_logprobs
        # A row predicts the token after it: rows of the prompt but its last one, each once even after preemption.
        first = max(sequence.num_computed, len(sequence.prompt_logprobs))
        last = min(sequence.num_computed + item.num_new, sequence.num_prompt - 1)
        if k is not None and not sequence.index and first < last:
            at = begin - sequence.num_computed
            targets = tuple(sequence.token_ids[first + 1 : last + 1])
            wanted.append(PromptRows(place, at + first, at + last, targets, k))
        begin += item.num_new
    return wanted


def idle_batch(layout: CacheLayout) -> Batch:
    """One token that nobody asked for, written to the block that nobody reads: for a replica that has nothing to do
    while others need its share of the experts."""
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    tables = GroupTables(np.zeros((1, 1), np.int32), zero, zero)
    return Batch((("", 0),), zero, one, zero, tuple(tables for _ in layout.groups))


def token_positions(starts: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[T]: each sequence's start plus the distance from its first row."""
    begin = np.cumsum(new) - new
    return np.arange(int(new.sum())) + np.repeat(starts - begin, new)
