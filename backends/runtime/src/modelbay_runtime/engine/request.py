"""A request: one prompt, its parameters, and the sequences it runs as."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from modelbay_runtime.engine.detokenizer import Detokenizer
from modelbay_runtime.engine.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    HiddenStatesOutput,
    Logprob,
    PoolingOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
)
from modelbay_runtime.engine.sequence import Sequence, Status
from modelbay_runtime.sampling_params import PoolingParams, SamplingParams


@dataclass(slots=True)
class Request:
    """What is in the engine under one id."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    sequences: list[Sequence]
    metrics: RequestMetrics
    stream: bool = False
    #: As clients get them, made once; nothing predicts the first token.
    shown_prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])

    @property
    def finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)

    @property
    def prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens are wanted at each position of the prompt; None: nothing."""
        return self.params.prompt_logprobs if isinstance(self.params, SamplingParams) else None

    def mark_scheduled(self) -> None:
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def mark_token(self) -> None:
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()

    def _update_metrics(self) -> None:
        self.metrics.num_cached_tokens = sum(sequence.num_cached or 0 for sequence in self.sequences)
        self.metrics.num_preemptions = sum(sequence.num_preemptions for sequence in self.sequences)
        self.metrics.num_draft_tokens = sum(sequence.num_drafts for sequence in self.sequences)
        self.metrics.num_accepted_tokens = sum(sequence.num_accepted for sequence in self.sequences)
        if self.finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()

    def pooling_output(self) -> PoolingOutput:
        """What was made of the hidden states of a request that is done."""
        self._update_metrics()
        sequence = self.sequences[0]
        assert sequence.pooling is not None, "only requests that pool come here"
        assert sequence.pooled is not None, "the last chunk of a sequence brings its result"
        facts = (self.id, self.prompt, self.prompt_token_ids)
        if sequence.pooling.kind == "hidden":
            return HiddenStatesOutput(*facts, sequence.pooled, self.metrics)
        values = sequence.pooled.tolist()
        if sequence.pooling.kind == "embed":
            return EmbeddingOutput(*facts, values, self.metrics)
        if sequence.pooling.kind == "score":
            return ScoringOutput(*facts, values[0], self.metrics)
        return ClassificationOutput(*facts, values, self.metrics)

    def output(self, detokenizer: Detokenizer) -> RequestOutput:
        """Everything so far."""
        self._update_metrics()
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._completion(sequence, detokenizer) for sequence in self.sequences],
            prompt_logprobs=self._prompt_logprobs(detokenizer),
            metrics=self.metrics,
            finished=self.finished,
        )

    def _completion(self, sequence: Sequence, detokenizer: Detokenizer) -> CompletionOutput:
        assert isinstance(self.params, SamplingParams), "only generation has completions"
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=sequence.text.text if sequence.text is not None else "",
            token_ids=list(sequence.output_ids),
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if wanted else None,
            logprobs=list(self.show_logprobs(sequence, detokenizer)) if wanted else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    @staticmethod
    def show_logprobs(sequence: Sequence, detokenizer: Detokenizer) -> list[dict[int, Logprob]]:
        """As clients get them: each entry is made once, when its token comes, so that no step has to make them all."""
        shown = sequence.shown_logprobs
        shown += [entry.to_dict(detokenizer.token_text) for entry in sequence.logprobs[len(shown) :]]
        return shown

    def _prompt_logprobs(self, detokenizer: Detokenizer) -> list[dict[int, Logprob] | None] | None:
        if not isinstance(self.params, SamplingParams) or self.params.prompt_logprobs is None:
            return None
        entries = self.sequences[0].prompt_logprobs
        shown = self.shown_prompt_logprobs
        shown += [entry.to_dict(detokenizer.token_text) for entry in entries[len(shown) - 1 :]]
        return list(shown)
