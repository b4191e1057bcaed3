"""What a round was asked for, and what came of it, sequence by sequence.

Legend: R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from modelbay.errors import EngineError
from modelbay_runtime.engine.batch import Batch
from modelbay_runtime.engine.guess import Guess
from modelbay_runtime.engine.runner import BatchOutput
from modelbay_runtime.engine.scheduler import Scheduled

#: What every lane computes in one round; None: nothing.
Round = list[tuple[list[Scheduled], Batch] | None]


class StepOutput:
    """A lane's part of a round.

    Attributes:
        sampled: the sequences that ``logits`` [R, V] are for; ``rows``: of each, the row of its next token.
        guesses: the rows behind tokens that were guessed.
        pooled: request id -> what was made of its hidden states.
    """

    def __init__(self, scheduled: list[Scheduled], batch: Batch, output: BatchOutput) -> None:
        sequences = [item.sequence for item in scheduled]
        self.sampled = [sequences[place] for place in batch.sampled]
        self.logits, self.pooled = output.logits, output.pooled
        counts = [1 + (batch.drafts[place] if batch.drafts else 0) for place in batch.sampled]
        self.rows = list(accumulate(counts, initial=0))[:-1]
        self.guesses = [
            Guess(sequences[place], tokens, self.logits[row + 1 : row + 1 + len(tokens)])
            for place, row in zip(batch.sampled, self.rows, strict=True)
            if self.logits is not None and (tokens := output.drafts.get(place))
        ]
        found = zip(batch.prompt_rows, output.prompt_logprobs, strict=True)
        self.prompt_logprobs = [(sequences[rows.sequence], entries) for rows, entries in found]

    def take_prompt_logprobs(self) -> None:
        """To their sequences, but for those that were given up meanwhile."""
        for sequence, entries in self.prompt_logprobs:
            if sequence.in_flight:
                sequence.prompt_logprobs += entries


def check_pooled(pooled: Mapping[str, torch.Tensor]) -> None:
    """``pooled``: request id -> result. Where the engine looks at it an error ends a step; on a rank it would end all.

    Raises:
        EngineError: results that are no numbers; their requests are named.
    """
    bad = [name for name, result in pooled.items() if not torch.isfinite(result).all()]
    if bad:
        names = ", ".join(map(repr, bad))
        raise EngineError(f"request {names}: the model gave values that are no numbers.", request_ids=bad)
