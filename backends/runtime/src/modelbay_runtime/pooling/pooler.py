"""What stands after the model: hidden states of a step in, the results of sequences that are complete out.

It lives beside the model and keeps everything on its device; what leaves it is a row per sequence, on the CPU.
Legend: T tokens of the step, B sequences, H hidden size, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from modelbay_runtime.pooling.classifier import row_read
from modelbay_runtime.pooling.plan import PoolingPlan
from modelbay_runtime.pooling.reduce import Chunk, Partial, divisor, merge, reduce_step
from modelbay_runtime.pooling.stages import ACTIVATIONS, load_stages, normalized

if TYPE_CHECKING:
    from modelbay.resolve import Resolution


class Pooler:
    """Args:
    model: follows the model contract; of a classifier, `modelbay_runtime.pooling.classifier.Classifier` too.
    """

    def __init__(self, model: Any, resolution: Resolution, device: torch.device) -> None:
        self.model = model
        self.stages = load_stages(resolution, device)
        self.pad_token_id = resolution.pooling.pad_token_id if resolution.pooling else None
        self._partial: dict[str, Partial] = {}

    def forget(self, keys: Iterable[str]) -> None:
        """These sequences will not be completed."""
        for key in keys:
            self._partial.pop(key, None)

    @torch.inference_mode()
    def take(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """hidden [T, H] -> the results of the sequences that are complete now, float32 on the CPU: an embedding [D],
        probabilities [C], or hidden states [T', H].

        A chunk whose ``first`` is 0 begins its sequence, whatever was taken of it before.
        """
        for chunk in chunks:
            if not chunk.first:
                self._partial.pop(chunk.key, None)
        results: dict[str, torch.Tensor] = {}
        for kind, group in _grouped(chunks, lambda chunk: chunk.plan.kind):
            take = {"hidden": self._take_hidden, "embed": self._take_embeddings}.get(kind, self._take_classes)
            results.update(take(hidden, group))
        self.forget(results)
        return results

    def _take_hidden(self, hidden: torch.Tensor, chunks: list[Chunk]) -> dict[str, torch.Tensor]:
        results = {}
        for chunk in chunks:
            rows = hidden[chunk.begin : chunk.begin + chunk.count].float().cpu()
            kept = self._keep(chunk).hidden
            kept.append(rows if chunk.complete else rows.clone())  # a view would keep the whole step's
            if chunk.complete:
                results[chunk.key] = torch.cat(kept)
        return results

    # ---- embeddings ------------------------------------------------------------------------------------------------

    def _take_embeddings(self, hidden: torch.Tensor, chunks: list[Chunk]) -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = {}
        for modes, group in _grouped(chunks, lambda chunk: chunk.plan.modes):
            vectors = [self._vectors(hidden, group, mode) for mode in modes]
            done = [chunk for chunk in group if chunk.complete]
            if done:
                results.update(self._finish(torch.cat(vectors, -1), done))
        return results

    def _vectors(self, hidden: torch.Tensor, chunks: list[Chunk], mode: str) -> torch.Tensor:
        """[B, H] of the sequences that are complete; the others' parts are kept."""
        rows: list[torch.Tensor] = []
        divisors: list[float] = []
        for chunk, part in zip(chunks, reduce_step(hidden, chunks, mode), strict=True):
            if chunk.count != chunk.total:
                kept = self._keep(chunk).rows
                part = merge(mode, kept.get(mode), part)
                if part is not None and not chunk.complete:
                    kept[mode] = part.clone()
            if chunk.complete:
                assert part is not None, "a complete sequence has at least one token that is pooled"
                rows.append(part)
                divisors.append(divisor(mode, chunk))
        if not rows:
            return hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
        return torch.stack(rows) / torch.tensor(divisors, device=hidden.device)[:, None]

    def _finish(self, vectors: torch.Tensor, chunks: list[Chunk]) -> dict[str, torch.Tensor]:
        for stage in self.stages:
            vectors = stage(vectors)
        results: dict[str, torch.Tensor] = {}
        numbered = list(enumerate(chunks))
        for (dimensions, normalize), group in _grouped(
            numbered, lambda item: (item[1].plan.dimensions, item[1].plan.normalize)
        ):
            rows = vectors if len(group) == len(chunks) else vectors[[index for index, _ in group]]
            if dimensions is not None:
                rows = rows[:, :dimensions]  # before it is scaled (CASES 38)
            rows = normalized(rows) if normalize else rows
            results.update(_rows(rows, [chunk for _, chunk in group]))
        return results

    # ---- classes ---------------------------------------------------------------------------------------------------

    def _take_classes(self, hidden: torch.Tensor, chunks: list[Chunk]) -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = {}
        ready: list[tuple[Chunk, torch.Tensor]] = []
        whole = self.model.reads == "all"
        for chunk in chunks:
            rows = self._read(hidden, chunk)
            kept = self._keep(chunk).hidden if chunk.count != chunk.total else []
            if rows is not None:
                kept.append(rows.clone() if not chunk.complete else rows)
            if chunk.complete:
                ready.append((chunk, torch.cat(kept)))
        if not ready:
            return results
        logits = self._logits(ready, whole).float()
        for (plan, _), group in _grouped(list(enumerate(ready)), lambda item: (item[1][0].plan, None)):
            values = logits[[index for index, _ in group]]
            results.update(_rows(_activated(values, plan), [chunk for _, (chunk, _) in group]))
        return results

    def _row(self, chunk: Chunk) -> int:
        return row_read(chunk.token_ids, self.model.reads, self.pad_token_id)

    def _read(self, hidden: torch.Tensor, chunk: Chunk) -> torch.Tensor | None:
        """What of a chunk the head reads: [n, H]."""
        if self.model.reads == "all":
            return hidden[chunk.begin : chunk.begin + chunk.count]
        place = self._row(chunk) - chunk.first
        return hidden[chunk.begin + place : chunk.begin + place + 1] if 0 <= place < chunk.count else None

    def _logits(self, ready: list[tuple[Chunk, torch.Tensor]], whole: bool) -> torch.Tensor:
        """[B, C]."""
        device = ready[0][1].device
        if whole:
            ids = [torch.tensor([list(chunk.token_ids)], device=device) for chunk, _ in ready]
            return torch.cat([self.model.classify(rows[None], i) for (_, rows), i in zip(ready, ids, strict=True)])
        picked = torch.tensor([[chunk.token_ids[self._row(chunk)]] for chunk, _ in ready], device=device)
        logits: torch.Tensor = self.model.classify(torch.stack([rows for _, rows in ready]), picked)
        return logits

    def _keep(self, chunk: Chunk) -> Partial:
        return self._partial.setdefault(chunk.key, Partial())


def _activated(logits: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
    return ACTIVATIONS[plan.activation](logits)


def _rows(values: torch.Tensor, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """One copy to the CPU for all of them."""
    return {chunk.key: row for chunk, row in zip(chunks, values.cpu().unbind(), strict=True)}


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    """Items with equal keys, in order of their first appearance."""
    found: dict[Any, list[Any]] = {}
    for value, group in groupby(items, key):
        found.setdefault(value, []).extend(group)
    return list(found.items())
