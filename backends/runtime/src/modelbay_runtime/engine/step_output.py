"""What a round was asked for, and what came of it, sequence by sequence.

Legend: R rows that are sampled, V vocabulary.
"""

from __future__ import annotations

from modelbay_runtime.engine.batch import Batch
from modelbay_runtime.engine.runner import BatchOutput
from modelbay_runtime.engine.scheduler import Scheduled

#: What every lane computes in one round; None: nothing.
Round = list[tuple[list[Scheduled], Batch] | None]


class StepOutput:
    """A lane's part of a round.

    Attributes:
        sampled: the sequences that ``logits`` [R, V] belong to, row by row.
        pooled: request id -> what was made of its hidden states.
    """

    def __init__(self, scheduled: list[Scheduled], batch: Batch, output: BatchOutput) -> None:
        sequences = [item.sequence for item in scheduled]
        self.sampled = [sequences[place] for place in batch.sampled]
        self.logits, self.pooled = output.logits, output.pooled
        found = zip(batch.prompt_rows, output.prompt_logprobs, strict=True)
        self.prompt_logprobs = [(sequences[rows.sequence], entries) for rows, entries in found]
