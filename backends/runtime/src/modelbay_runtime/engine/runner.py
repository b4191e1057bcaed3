"""One step on one rank: from a batch to hidden states, and on the last stage to logits.

Legend: T tokens of the step, B sequences, R rows that are sampled, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from modelbay_runtime.api import KVGroupStep, Step
from modelbay_runtime.build import BuiltModel
from modelbay_runtime.engine.batch import Batch, token_positions
from modelbay_runtime.engine.drafter import Drafter
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.logprobs import logprobs_of
from modelbay_runtime.engine.outputs import TokenLogprobs
from modelbay_runtime.multimodal.features import FeatureStore
from modelbay_runtime.pooling.pooler import Pooler

#: Rows of prompt logits that are made at once: [rows, V] in float32 stays within a few hundred MB.
_PROMPT_ROWS = 256


class Neighbours(Protocol):
    """The stages before and after this one."""

    def receive(self, tokens: int) -> torch.Tensor | None:
        """[tokens, H] from the stage before; None on the first."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """[T, H] to the stage after."""
        ...


@dataclass(slots=True)
class BatchOutput:
    """What comes out at the end of the last stage.

    Attributes:
        logits: [R, V] of the batch's ``sampled`` sequences, in their order; None if there are none.
        hidden: [T, H] of all tokens; None where another process computed them.
        prompt_logprobs: of each of the batch's ``prompt_rows``.
        drafts: place of a sequence -> the tokens guessed for it; its rows of ``logits`` are one more.
        pooled: request id -> its result, of the sequences whose last chunk was among the batch's ``chunks``.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor | None
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)


class Runner:
    """A rank's model and its cache.

    Args:
        vocab_size: columns of the logits that are tokens.
        neighbours: None where the model is whole.
        pooler: on the last stage.
        media_cache_bytes: of features of images and audio, kept between steps.
        draft_tokens: most that are guessed for a sequence in a step. max_seqs: of which so many are remembered.
    """

    def __init__(
        self,
        built: BuiltModel,
        cache: KVCache,
        vocab_size: int,
        neighbours: Neighbours | None = None,
        pooler: Pooler | None = None,
        media_cache_bytes: int = 0,
        draft_tokens: int = 0,
        max_seqs: int = 0,
    ) -> None:
        self.model: Any = built.module
        self.device = built.context.device
        self.is_last_stage = built.context.parallel.is_last_stage
        self.cache = cache
        self.vocab_size = vocab_size
        self.neighbours = neighbours
        self.pooler = pooler
        self.features = FeatureStore(self.model, media_cache_bytes, among_ranks=built.context.parallel.mesh.size > 1)
        self.drafter = None
        if draft_tokens:
            layout = cache.layout
            self.drafter = Drafter(self.model, layout, self._prepare, vocab_size, draft_tokens, 2 * max_seqs)
        self._layers = [(layer, index) for index, group in enumerate(cache.layout.groups) for layer in group.layers]

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchOutput | None:
        """Compute the batch's tokens; None but on the last stage."""
        drafts: dict[int, list[int]] = {}
        if self.drafter is not None and any(batch.drafts):
            batch, drafts = self.drafter.guess(batch)
        step, input_ids = self._prepare(batch)
        received = None if self.neighbours is None else self.neighbours.receive(step.num_tokens)
        if received is None and batch.media is not None and len(batch.media.rows):
            embeds = self.features.embeds(input_ids, batch.media, self._tensor)
            hidden = self.model(None, step.positions, step, embeds)
        elif received is None:
            hidden = self.model(input_ids, step.positions, step)
        else:
            hidden = self.model(None, step.positions, step, received)
        if not self.is_last_stage:
            assert self.neighbours is not None, "a stage that is not the last has one after it"
            self.neighbours.send(hidden)
            return None
        if self.drafter is not None:
            self.drafter.keep(batch, hidden)
        prompt_logprobs, pooled = self._prompt_logprobs(batch, hidden), self._pooled(batch, hidden)
        return BatchOutput(self._logits(batch, hidden), hidden, prompt_logprobs, pooled, drafts)

    def _pooled(self, batch: Batch, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.pooler is None or not (batch.chunks or batch.forget):
            return {}
        self.pooler.forget(batch.forget)
        return self.pooler.take(hidden, batch.chunks)

    def _logits(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor | None:
        if not batch.sampled:
            return None
        if len(batch.sampled) == hidden.shape[0]:
            return self.model.logits(hidden)
        rows = batch.sampled_rows()
        return self.model.logits(hidden.index_select(0, self._tensor(rows)))

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[list[TokenLogprobs]]:
        entries = []
        for wanted in batch.prompt_rows:
            found: list[TokenLogprobs] = []
            for first, logits in self.prompt_logits(hidden[wanted.begin : wanted.end]):
                targets = torch.tensor(wanted.targets[first : first + len(logits)], device=logits.device)
                found += logprobs_of(logits[:, : self.vocab_size], targets, wanted.k)
            entries.append(found)
        return entries

    @torch.inference_mode()
    def prompt_logits(self, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Logits of many rows, a few at a time: yields (first row, [rows, V])."""
        for first in range(0, hidden.shape[0], _PROMPT_ROWS):
            yield first, self.model.logits(hidden[first : first + _PROMPT_ROWS])

    def _prepare(self, batch: Batch) -> tuple[Step, torch.Tensor]:
        query_start = np.zeros(len(batch.new) + 1, np.int32)
        np.cumsum(batch.new, out=query_start[1:])
        media, positions = batch.media, None if batch.media is None else batch.media.positions
        step = Step(
            positions=self._tensor(token_positions(batch.starts, batch.new) if positions is None else positions),
            query_start=self._tensor(query_start),
            seq_lens=self._tensor(batch.lengths.astype(np.int32)),
            query_lens=batch.new.tolist(),
            context_lens=batch.lengths.tolist(),
            num_decodes=batch.num_decodes,
            caches=self.cache.views,
        )
        groups = [
            KVGroupStep(
                slots=self._tensor(tables.slots),
                block_tables=self._tensor(tables.tables),
                first_position=self._tensor(tables.first.astype(np.int32)),
                block_size=group.block_size or 1,
            )
            for group, tables in zip(self.cache.layout.groups, batch.groups, strict=True)
        ]
        step.groups = {layer: groups[index] for layer, index in self._layers}
        if batch.token_types is not None:
            step.token_types = self._tensor(batch.token_types)
        if media is not None and media.spans is not None:
            step.spans = self._tensor(media.spans)
        return step, self._tensor(batch.input_ids)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
