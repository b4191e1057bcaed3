"""Log-probabilities of tokens, from raw logits.

They are the model's own: log-softmax in float32 of the logits as they come out of it, before penalties, temperature
or any other sampling parameter. So the number a token gets does not depend on how it was chosen.

Shapes: T positions, V the width of the logits.
"""

from __future__ import annotations

import torch

from modelbay_runtime.engine.outputs import TokenLogprobs

# Positions turned into float32 at once: keeps the copy of a long prompt's logits small.
_CHUNK = 64


def logprobs_of(
    logits: torch.Tensor, targets: torch.Tensor, k: int, *, vocab_size: int | None = None
) -> list[TokenLogprobs]:
    """The log-probability and rank of one token per position, and the k likeliest tokens there.

    Args:
        logits: [T, V], any float dtype.
        targets: [T], the token whose log-probability is wanted (for a prompt: the next one).
        k: likeliest tokens to return as well; 0 for none.
        vocab_size: true vocabulary where V is padded; columns past it count for nothing.

    Returns:
        T entries, in order.
    """
    width = logits.shape[-1] if vocab_size is None else vocab_size
    result: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], _CHUNK):
        stop = start + _CHUNK
        result += _chunk(logits[start:stop, :width].float(), targets[start:stop].to(logits.device), min(k, width))
    return result


def _chunk(logits: torch.Tensor, targets: torch.Tensor, k: int) -> list[TokenLogprobs]:
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(-1, targets[:, None])
    # Strictly likelier tokens: a token that ties for the first place has rank 1.
    ranks = (logits > chosen).sum(dim=-1) + 1
    values, ids = logits.topk(k, dim=-1)
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids, top_logprobs)
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            targets.tolist(),
            (chosen - normaliser).squeeze(-1).tolist(),
            ranks.tolist(),
            ids.tolist(),
            (values - normaliser).tolist(),
            strict=True,
        )
    ]
