"""What a step's scheduled sequences bring to the pooler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from modelbay_runtime.pooling.reduce import Chunk

if TYPE_CHECKING:
    from modelbay_runtime.engine.scheduler import Scheduled


def chunks_of(scheduled: Sequence[Scheduled]) -> tuple[Chunk, ...]:
    """A chunk for each sequence that is pooled."""
    chunks, begin = [], 0
    for item in scheduled:
        sequence, plan = item.sequence, item.sequence.pooling
        if plan is not None:
            ids = tuple(sequence.token_ids) if plan.wants_ids else ()
            chunks.append(
                Chunk(sequence.request_id, begin, item.num_new, sequence.num_computed, len(sequence), plan, ids)
            )
        begin += item.num_new
    return tuple(chunks)


def token_types_of(scheduled: Sequence[Scheduled]) -> np.ndarray | None:
    """[T], None if every token's is 0."""
    if all(item.sequence.token_types is None for item in scheduled):
        return None
    parts = []
    for item in scheduled:
        first, types = item.sequence.num_computed, item.sequence.token_types
        new = [0] * item.num_new if types is None else types[first : first + item.num_new]
        parts.append(np.array(new, np.int64))
    return np.concatenate(parts)
