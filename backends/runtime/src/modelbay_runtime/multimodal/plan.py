"""Where a request's images and audio lie among its tokens: for the scheduler, the prefix cache and the batch.

Legend: T tokens of the prompt, N tokens that feature rows replace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from modelbay.errors import UsageError
from modelbay_runtime.multimodal.data import Media, MediaItem


class MediaPlan:
    """A request's media, checked and indexed. Its sequences share one.

    Attributes:
        items: as the processor made them; ``rows_of`` each, so many tokens are replaced.
        places: [N] the tokens that are replaced, in order; ``item_of``, ``feature_of``: [N] by which item's which row.
        whole: begin and end of each span that one step must compute, in order.
        positions: [P, T], or None if they are 0, 1, 2 …; ``delta`` beyond the prompt.

    Raises:
        UsageError: spans outside the prompt or over each other, or one that no step has room for.
    """

    def __init__(self, media: Media, token_ids: Sequence[int], max_step_tokens: int) -> None:
        self.items: list[MediaItem] = media.items
        self.num_tokens = len(token_ids)
        self.delta = media.delta
        self.positions = _checked_positions(media, len(token_ids))
        self.places, self.item_of, self.feature_of = _index(media, len(token_ids))
        self.rows_of = np.bincount(self.item_of, minlength=len(self.items)).tolist()
        self.whole = sorted((span.start, span.start + span.length) for span in media.spans if span.bidirectional)
        for begin, end in self.whole:
            if end - begin > max_step_tokens:
                raise UsageError(
                    f"an image of {end - begin} tokens, which see each other both ways, must be computed in one step, "
                    f"and a step has at most {max_step_tokens}.",
                    hint=f"Raise max_num_batched_tokens to {end - begin} or more, or make the image smaller.",
                )
        self._whole_digests = [self._digest(begin, end, token_ids) for begin, end in self.whole]

    def cut(self, end: int) -> int:
        """``end``, or the beginning of the span that would be torn there."""
        for first, last in self.whole:
            if first < end < last:
                return first
        return end

    def window(self, begin: int, end: int) -> slice:
        """Which of the replaced tokens lie at ``begin`` to ``end``."""
        low, high = np.searchsorted(self.places, (begin, end))
        return slice(int(low), int(high))

    def content(self, begin: int, end: int) -> bytes:
        """What tokens ``begin`` to ``end`` mean beyond their ids: equal for equal images at equal places; nothing where
        there is text alone."""
        found = self.window(begin, end)
        parts: list[bytes] = []
        if found.start < found.stop:
            parts += [self.places[found].tobytes(), self.feature_of[found].tobytes()]
            parts += [_sized(self.items[item].digest) for item in self.item_of[found].tolist()]
        # Of a span that is seen both ways every row depends on all of it.
        parts += [
            digest
            for (first, last), digest in zip(self.whole, self._whole_digests, strict=True)
            if first < end and begin < last
        ]
        if self.positions is not None and begin < self.num_tokens:
            rows = self.positions[:, begin:end]
            if (rows != np.arange(begin, begin + rows.shape[1])).any():
                parts.append(rows.tobytes())
        return b"".join(_sized(part) for part in parts)

    def positions_of(self, begin: int, end: int) -> np.ndarray:
        """[end - begin], or [P, end - begin] where the rows differ."""
        beyond = np.arange(max(begin, self.num_tokens), end) + self.delta
        if self.positions is None:
            return np.concatenate([np.arange(begin, min(end, self.num_tokens)), beyond])
        rows = self.positions[:, begin : min(end, self.num_tokens)]
        if not rows.shape[1]:
            return beyond
        rows = np.concatenate([rows, np.broadcast_to(beyond, (rows.shape[0], len(beyond)))], axis=1)
        return rows[0] if (rows == rows[0]).all() else rows

    def _digest(self, begin: int, end: int, token_ids: Sequence[int]) -> bytes:
        found = self.window(begin, end)
        digest = hashlib.blake2b(np.array([begin, end, *token_ids[begin:end]], np.int64).tobytes(), digest_size=16)
        digest.update(self.places[found].tobytes() + self.feature_of[found].tobytes())
        for item in self.item_of[found].tolist():
            digest.update(_sized(self.items[item].digest))
        return digest.digest()


def _sized(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _checked_positions(media: Media, num_tokens: int) -> np.ndarray | None:
    if media.positions is None:
        return None
    positions = np.ascontiguousarray(media.positions, np.int64)
    assert positions.shape[1:] == (num_tokens,), "a processor gives positions for every token"
    plain = not media.delta and (positions == np.arange(num_tokens)).all()
    return None if plain else positions


def _index(media: Media, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token, item and feature row of every token that is replaced. Spans of one item take its rows in order."""
    spans = sorted(media.spans, key=lambda span: span.start)
    for before, after in pairwise(spans):
        if before.start + before.length > after.start:
            raise UsageError(f"two images or pieces of audio stand for token {after.start} of the prompt.")
    taken = [0] * len(media.items)
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for span in spans:
        if span.start < 0 or span.start + span.length > num_tokens:
            raise UsageError(f"an image or piece of audio stands beyond the prompt's {num_tokens} tokens.")
        within = np.arange(span.length) if span.places is None else np.flatnonzero(span.places)
        first, taken[span.item] = taken[span.item], taken[span.item] + len(within)
        columns.append((span.start + within, np.full(len(within), span.item), first + np.arange(len(within))))
    if not columns:
        return tuple(np.zeros(0, np.int64) for _ in range(3))  # type: ignore[return-value]
    places, item_of, feature_of = (np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True))
    return places, item_of, feature_of
