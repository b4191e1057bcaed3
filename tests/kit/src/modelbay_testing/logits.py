"""Every logit that the engine computes, and Transformers' for the same tokens: what numbers are compared on.

Legend: P prompt tokens, O output tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from modelbay_testing.recording import record_logits


def engine_logits(
    llm: Any, prompts: Sequence[Sequence[int]], output_tokens: int = 1
) -> list[tuple[list[int], torch.Tensor]]:
    """Run prompts together, greedily, and return for each its tokens (prompt and output) and their logits.

    The logits are those of the engine's own steps, chunk by chunk and token by token: [P + O - 1, V] float32, row i
    from the step that computed token i. Rows that the prefix cache spared are NaN.
    """
    from modelbay import SamplingParams

    with record_logits(llm) as recording:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    results = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        missing = torch.full((llm.resolution.config.vocab_size,), float("nan"))
        rows = recording.rows[output.request_id, 0]
        logits = [_number(rows[i][-1]) if i in rows else missing for i in range(len(tokens) - 1)]
        results.append((tokens, torch.stack(logits)))
    return results


def _number(row: torch.Tensor) -> torch.Tensor:
    """NaN stands for a row that was not computed: one that was and is no number must not pass for it."""
    row = row.float().cpu()
    return row.masked_fill(row.isnan(), float("inf"))


def transformers_logits(
    path: str | Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Transformers' own logits of whole sequences, one at a time: [len(sequence) - 1, V] float32 each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        return [model(torch.tensor([list(ids)[:-1]])).logits[0].float() for ids in sequences]


def worst_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference, over the rows that were computed; infinite where one side is no number."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        computed = ~ours.isnan().all(-1)
        assert computed.any(), "no row was computed"
        ours, theirs = ours[computed], theirs[computed]
        difference = (ours - theirs).abs().masked_fill(ours == theirs, 0.0)
        worst = max(worst, difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item())
    return worst
