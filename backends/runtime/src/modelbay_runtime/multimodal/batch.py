"""A step's images and audio as plain data, as every rank needs them.

Legend: T tokens of the step, N of them replaced by feature rows, P rows of positions.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from modelbay_runtime.multimodal.data import MediaItem
from modelbay_runtime.multimodal.plan import MediaPlan


@dataclass(frozen=True, slots=True)
class StepItem:
    """An item with a token in this step. ``rows``: how many feature rows its prompt has tokens for. ``requests``: those
    that have it, for messages."""

    item: MediaItem
    rows: int
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchMedia:
    """Attributes:
    items: those with a token in this step, each once.
    rows: [N] tokens of the step that are replaced; ``item_of``, ``feature_of``: [N] by which item's which feature row.
    positions: [T], or [P, T] where the rows differ; None if each token's position is its place in its sequence.
    spans: [T] int32, the number of the bidirectional span that each token is in, -1 outside; None if there are none.
    epoch: features computed in an earlier one are not to be used: the weights may be others.
    """

    items: tuple[StepItem, ...]
    rows: np.ndarray
    item_of: np.ndarray
    feature_of: np.ndarray
    positions: np.ndarray | None = None
    spans: np.ndarray | None = None
    epoch: int = 0


def batch_media(
    names: SequenceOf[str],
    plans: SequenceOf[MediaPlan | None],
    starts: np.ndarray,
    lengths: np.ndarray,
    epoch: int,
) -> BatchMedia | None:
    """Of a batch's sequences, which compute tokens ``starts`` to ``lengths`` [B]; None if there is text alone.

    Args:
        names: the request of each. epoch: see `BatchMedia`.
    """
    if all(plan is None for plan in plans):
        return None
    items, rows, item_of, feature_of = _replaced(names, plans, starts, lengths)
    positions, spans = _positions(plans, starts, lengths), _spans(plans, starts, lengths)
    if not len(rows) and positions is None and spans is None:
        return None
    used, item_of = np.unique(item_of, return_inverse=True)  # a prompt may have items of which this step has no token
    return BatchMedia(tuple(items[i] for i in used), rows, item_of, feature_of, positions, spans, epoch)


def _replaced(
    names: SequenceOf[str], plans: SequenceOf[MediaPlan | None], starts: np.ndarray, lengths: np.ndarray
) -> tuple[list[StepItem], np.ndarray, np.ndarray, np.ndarray]:
    """Items of different content, and row, item and feature row of each token that is replaced."""
    numbers: dict[bytes, int] = {}
    items: list[StepItem] = []
    columns = [np.zeros((3, 0), np.int64)]
    begin = 0
    for name, plan, start, end in zip(names, plans, starts.tolist(), lengths.tolist(), strict=True):
        found = slice(0, 0) if plan is None else plan.window(start, end)
        if plan is not None and found.start < found.stop:
            for item, count in zip(plan.items, plan.rows_of, strict=True):
                number = numbers.setdefault(item.digest, len(items))
                if number == len(items):
                    items.append(StepItem(item, count, (name,)))
                elif name not in items[number].requests:
                    items[number] = replace(items[number], requests=(*items[number].requests, name))
            number_of = np.array([numbers[item.digest] for item in plan.items], np.int64)
            rows = plan.places[found] - start + begin
            columns.append(np.stack([rows, number_of[plan.item_of[found]], plan.feature_of[found]]))
        begin += end - start
    rows, item_of, feature_of = np.concatenate(columns, axis=1)
    return items, rows, item_of, feature_of


def _positions(plans: SequenceOf[MediaPlan | None], starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    if not any(plan is not None and (plan.positions is not None or plan.delta) for plan in plans):
        return None
    parts = [
        np.arange(start, end) if plan is None else plan.positions_of(start, end)
        for plan, start, end in zip(plans, starts.tolist(), lengths.tolist(), strict=True)
    ]
    height = max((part.shape[0] for part in parts if part.ndim == 2), default=0)
    if not height:
        return np.concatenate(parts)
    return np.concatenate([np.broadcast_to(part, (height, part.shape[-1])) for part in parts], axis=1)


def _spans(plans: SequenceOf[MediaPlan | None], starts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    spans = np.full(int((lengths - starts).sum()), -1, np.int32)
    begin, number = 0, 0
    for plan, start, end in zip(plans, starts.tolist(), lengths.tolist(), strict=True):
        for first, last in () if plan is None else plan.whole:
            if start < last and first < end:
                assert start <= first, "the scheduler keeps spans whole"
                assert last <= end, "the scheduler keeps spans whole"
                spans[begin + first - start : begin + last - start] = number
                number += 1
        begin += end - start
    return spans if number else None
