"""Run requests with images and audio on a built model, without the engine: one prefill of all, then token by token.

Legend: T tokens of a prompt, P rows of positions, O output tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from modelbay_runtime.api import Step
from modelbay_testing.steps import SmallCache


@dataclass(slots=True)
class MediaRequest:
    """A prompt with placeholders expanded, and what stands in their places."""

    ids: list[int]
    media: Any = None  # modelbay_runtime.multimodal.data.Media
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def positions(self, begin: int, end: int, rows: int) -> torch.Tensor:
        """[P, end - begin]."""
        plain = torch.arange(begin, end)
        if self.media is None or self.media.positions is None:
            return plain.expand(rows, -1)
        said = torch.from_numpy(self.media.positions)
        beyond = (plain[plain >= said.shape[1]] + self.media.delta).expand(rows, -1)
        return torch.cat((said[:, begin:end], beyond), 1)


class MediaRunner:
    """A loaded module with a cache of its own.

    Args:
        vocabulary: ids from here on are placeholders, and are not generated.
    """

    def __init__(
        self, module: Any, kv_specs: Any, requests: list[MediaRequest], output_tokens: int, vocabulary: int
    ) -> None:
        self.module, self.requests, self.output_tokens, self.vocabulary = module, requests, output_tokens, vocabulary
        self.rows = max(
            (r.media.positions.shape[0] for r in requests if r.media and r.media.positions is not None), default=0
        )
        self.cache = SmallCache(kv_specs, [len(r.ids) + output_tokens for r in requests], torch.float32, 16)

    @torch.inference_mode()
    def run(self) -> None:
        """Fill every request's ``output`` and ``logits`` (one row for each token but the last)."""
        self._advance([(0, len(r.ids)) for r in self.requests])
        for _ in range(self.output_tokens - 1):
            self._advance([(len(r.ids) + len(r.output) - 1, len(r.ids) + len(r.output)) for r in self.requests])

    def _advance(self, ranges: list[tuple[int, int]]) -> None:
        ids = torch.cat(
            [torch.tensor([*r.ids, *r.output])[a:b] for r, (a, b) in zip(self.requests, ranges, strict=True)]
        )
        step = self._step(ranges)
        embeds = self._embeds(ids, ranges)
        hidden = self.module(ids if embeds is None else None, step.positions, step, embeds)
        logits = self.module.logits(hidden).float().split([b - a for a, b in ranges])
        for request, rows in zip(self.requests, logits, strict=True):
            request.logits += list(rows)
            request.output.append(int(rows[-1][: self.vocabulary].argmax()))

    def _embeds(self, ids: torch.Tensor, ranges: list[tuple[int, int]]) -> torch.Tensor | None:
        if ranges[0][0] > 0 or not any(r.media for r in self.requests):
            return None
        embeds: torch.Tensor = self.module.embed(ids).clone()
        begin = 0
        for request, (_, end) in zip(self.requests, ranges, strict=True):
            for span in request.media.spans if request.media else ():
                rows = self.module.encode_media(request.media.items[span.item])
                where = torch.arange(begin + span.start, begin + span.start + span.length)
                embeds[where if span.places is None else where[torch.from_numpy(span.places)]] = rows
            begin += end
        return embeds

    def _spans(self, ranges: list[tuple[int, int]]) -> torch.Tensor | None:
        found = torch.full((sum(b - a for a, b in ranges),), -1, dtype=torch.int32)
        begin, number = 0, 0
        for request, (a, b) in zip(self.requests, ranges, strict=True):
            for span in request.media.spans if request.media and a == 0 else ():
                if span.bidirectional:
                    found[begin + span.start : begin + span.start + span.length] = number
                    number += 1
            begin += b - a
        return found if number else None

    def _step(self, ranges: list[tuple[int, int]]) -> Step:
        positions = [r.positions(a, b, self.rows or 1) for r, (a, b) in zip(self.requests, ranges, strict=True)]
        joined = torch.cat(positions, 1)
        parts = [(number, begin, end) for number, (begin, end) in enumerate(ranges)]
        return self.cache.step(parts, joined if self.rows else joined[0], spans=self._spans(ranges))
