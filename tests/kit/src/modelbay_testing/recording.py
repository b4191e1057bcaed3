"""Watch a running engine: the logits that it really used, position by position, and Transformers' own to compare.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Recording:
    """Rows of logits by (request id, index of the sequence) and position; a preempted position has several."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def positions(self, request_id: str, index: int = 0) -> list[int]:
        """The positions whose tokens were computed: not those that a prefix cache had."""
        return sorted(self.rows[request_id, index])

    def worst_difference(self, request_id: str, reference: torch.Tensor, index: int = 0) -> float:
        """The largest absolute difference to ``reference`` [T, V] over every row that was computed; NaN is infinite."""
        worst = 0.0
        for position, rows in self.rows[request_id, index].items():
            for row in rows:
                difference = (row.float() - reference[position].float()).abs()
                worst = max(worst, float(difference.nan_to_num(nan=float("inf")).max()))
        return worst


@contextmanager
def record_logits(llm: Any) -> Iterator[Recording]:
    """While open, every forward pass of ``llm`` leaves the logits of all its tokens here.

    Rows that the engine samples from are the very ones it used; those of other tokens are made from their hidden
    states.
    """
    recording = Recording()
    runner = llm.engine.runner
    run = runner.run

    def recorded(batch: Any) -> Any:
        output = run(batch)
        sampled = {place: row for row, place in enumerate(batch.sampled)}
        for place, owner in enumerate(batch.owners):
            end, new, start = int(batch.ends[place]), int(batch.new[place]), int(batch.starts[place])
            rows = recording.rows[owner]
            prompt_rows = new - (place in sampled)
            for first, logits in runner.prompt_logits(output.hidden[end - new : end - new + prompt_rows]):
                for offset, row in enumerate(logits.clone()):
                    rows[start + first + offset].append(row)
            if place in sampled:
                rows[start + prompt_rows].append(output.logits[sampled[place]].clone())
        return output

    runner.run = recorded
    try:
        yield recording
    finally:
        del runner.run


class Reference:
    """Transformers' own model of a checkpoint.

    Args:
        dtype: "float32" or "bfloat16"; what it is loaded and run in.
    """

    def __init__(self, path: str | Path, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.model = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, dtype)).eval()
        # Nothing ends or warps what `greedy` generates.
        self.model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] of one sequence."""
        return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """The likeliest continuation by Transformers' `generate`, past any end-of-sequence token."""
        ids = torch.tensor([list(token_ids)])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
        )
        return output[0, len(token_ids) :].tolist()
