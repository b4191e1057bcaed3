"""Run requests with images and audio on a built model, without the engine: one prefill of all, then token by token.

Legend: T tokens of a prompt, P rows of positions, O output tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


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
    """A loaded module with a cache of its own, block tables laid out once for the longest that requests become.

    Args:
        vocabulary: ids from here on are placeholders, and are not generated.
    """

    def __init__(
        self, module: Any, kv_specs: Any, requests: list[MediaRequest], output_tokens: int, vocabulary: int
    ) -> None:
        from modelbay_runtime.engine.kv_cache import KVCache
        from modelbay_runtime.engine.kv_layout import plan_layout

        self.module, self.requests, self.output_tokens, self.vocabulary = module, requests, output_tokens, vocabulary
        self.rows = max(
            (r.media.positions.shape[0] for r in requests if r.media and r.media.positions is not None), default=0
        )
        layout = plan_layout(dict(kv_specs), 16)
        needed = [-(-(len(r.ids) + output_tokens) // 16) for r in requests]
        cache = KVCache(layout, 1 + sum(needed) * len(layout.groups), torch.float32, torch.device("cpu"))
        self.caches, self.layout = cache.views, layout
        self.tables = []
        block = 1
        for _ in layout.groups:
            table = torch.zeros(len(requests), max(needed), dtype=torch.int32)
            for i, count in enumerate(needed):
                table[i, :count] = torch.arange(block, block + count, dtype=torch.int32)
                block += count
            self.tables.append(table)

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

    def _step(self, ranges: list[tuple[int, int]]) -> Any:
        from modelbay_runtime.step import KVGroupStep, Step

        new = [b - a for a, b in ranges]
        groups: dict[int, Any] = {}
        for table, group in zip(self.tables, self.layout.groups, strict=True):
            size = group.block_size or 1
            slots = [
                table[i, torch.arange(a, b) // size].long() * size + torch.arange(a, b) % size
                for i, (a, b) in enumerate(ranges)
            ]
            state = KVGroupStep(torch.cat(slots), table, torch.zeros(len(ranges), dtype=torch.int32), size)
            groups |= dict.fromkeys(group.layers, state)
        positions = [r.positions(a, b, self.rows or 1) for r, (a, b) in zip(self.requests, ranges, strict=True)]
        joined = torch.cat(positions, 1)
        return Step(
            positions=joined if self.rows else joined[0],
            query_start=torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor([b for _, b in ranges], dtype=torch.int32),
            query_lens=new, context_lens=[b for _, b in ranges],
            num_decodes=len(ranges) if all(n == 1 for n in new) else 0,
            caches=self.caches, groups=groups, spans=self._spans(ranges),
        )  # fmt: skip
