"""What is not allowed next becomes impossible, in a batch where some sequences are constrained.

Shapes: R rows of the batch, C of them constrained, V the vocabulary, W the width of the scores (V, padded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from modelbay_runtime.engine.sampling_state import SamplingState
    from modelbay_runtime.structured.constraint import Bits


class Ending(NamedTuple):
    """Why a sequence ends without another token: as in `CompletionOutput`."""

    finish_reason: str
    stop_reason: str | None = None


CONFLICT = Ending(
    "error",
    "structured_outputs: no token is left that both the grammar and the other parameters of the request "
    "(min_tokens, bad_words, stop_token_ids) allow.",
)
_TOO_SHORT = Ending("error", "structured_outputs: the output is complete, but min_tokens asks for more tokens.")


def constrain(scores: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, Ending]:
    """Forbid, in place, what the constraints of these rows do not allow; other rows are not touched.

    Args:
        scores: [R, W], W a multiple of 8.

    Returns:
        For rows that have no next token: why.
    """
    rows = [row for row, state in enumerate(states) if state.constraint is not None]
    if not rows:
        return {}
    endings: dict[int, Ending] = {}
    bits = np.zeros((len(rows), scores.shape[-1] // 8), dtype=np.uint8)
    for place, row in enumerate(rows):
        ending = _fill(bits[place], states[row])
        if ending is not None:
            endings[row] = ending
    barred = torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little") == 0).to(scores.device)
    if len(rows) == len(scores):
        scores.masked_fill_(barred, -math.inf)
    else:
        index = torch.tensor(rows, device=scores.device)
        scores[index] = scores[index].masked_fill_(barred, -math.inf)
    return endings


def _fill(bits: Bits, state: SamplingState) -> Ending | None:
    """Set the bits [W / 8] of the tokens that may come next, or say why none may.

    A token that ends the request is never text, whatever the grammar would make of it: it may come where the output is
    complete, and nowhere else.
    """
    assert state.constraint is not None, "only constrained rows are filled"
    allowed = state.constraint.allowed()
    if state.constraint.error is not None:
        return Ending("error", f"structured_outputs: the grammar cannot go on: {state.constraint.error}.")
    count = min(len(bits), len(allowed))
    bits[:count] = allowed[:count]
    byte, bit = state.end_ids // 8, (1 << state.end_ids % 8).astype(np.uint8)
    np.bitwise_and.at(bits, byte, ~bit)
    if not bits.any():
        if not state.constraint.may_end:
            return CONFLICT
        if len(state.output_token_ids) < state.params.min_tokens:
            return _TOO_SHORT
        return Ending("stop")
    if state.constraint.may_end:
        np.bitwise_or.at(bits, byte, bit)
    return None
