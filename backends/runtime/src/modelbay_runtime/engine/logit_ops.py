"""The arithmetic of sampling on float32 logits, vectorised over rows, with no request in sight.

Shapes: R rows, V the width of the logits (the vocabulary, perhaps padded with -inf), C candidates, E edits.
Every row's result depends on that row alone, ties included: likelier first, then the lower token id.
"""

from __future__ import annotations

import math

import torch

# `draw` looks for a number in this many sums first, so it never makes a running sum over a whole vocabulary.
_BLOCK = 256
# Candidates to begin a nucleus with, and by how much to widen them where that was too few.
_NUCLEUS = 512
_WIDEN = 8
# Room for tokens that tie with the k-th: bfloat16 logits have many.
_TIES = 64


def padded_width(vocab_size: int) -> int:
    """``vocab_size`` rounded up so that `draw` needs no copy."""
    return -(-vocab_size // _BLOCK) * _BLOCK


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and the first index that has it, [R] each; NaN if the row holds one."""
    if logits.device.type != "cpu":
        values, ids = logits.max(dim=-1)
        return values, ids
    # A maximum without its index is several times quicker on a CPU: find the block first, then the place in it.
    width = logits.shape[-1]
    whole = width // _BLOCK * _BLOCK
    tops = logits[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(dim=-1)
    if whole < width:
        tops = torch.cat([tops, logits[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)
    values, block = tops.max(dim=-1)
    places = (block[:, None] * _BLOCK + torch.arange(_BLOCK)).clamp_(max=width - 1)
    inner = logits.gather(-1, places).max(dim=-1, keepdim=True).indices
    return values, places.gather(-1, inner).squeeze(-1)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Penalise, in place, the tokens that occurred.

    Repetition divides positive logits and multiplies negative ones (CTRL, arXiv:1909.05858, section 4.1); presence
    and frequency are subtracted (OpenAI's definition).

    Args:
        logits: [R, V].
        rows, ids: [E] each, no pair twice: a token that occurs in the prompt or the output of that row.
        counts: [E], how often it occurs in the output alone.
        repetition, presence, frequency: [E], the row's penalties.
    """
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, ids] = values - frequency * counts - presence * (counts > 0)


def mask_below_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Forbid, in place, tokens less likely than ``min_p`` [R] times the likeliest token (arXiv:2407.01082)."""
    # p < min_p * p_max, in logs: no softmax needed.
    floor = logits.amax(dim=-1) + min_p.log()
    logits.masked_fill_(logits < floor[:, None], -math.inf)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index drawn in proportion to ``weights`` by inverting the cumulative distribution, in index order.

    Args:
        weights: [R, V], not negative, not all zero in a row; need not sum to 1.
        uniform: [R], float64 in [0, 1).

    Returns:
        [R] int64; never an index of weight zero.
    """
    rest = -weights.shape[-1] % _BLOCK
    blocks = (
        torch.nn.functional.pad(weights, (0, rest)).unflatten(-1, (-1, _BLOCK))
        if rest
        else (weights.unflatten(-1, (-1, _BLOCK)))
    )
    edges = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniform * edges[:, -1]
    block = _first_beyond(edges, target)
    before = torch.nn.functional.pad(edges, (1, 0)).gather(-1, block[:, None]).squeeze(-1)
    inner = blocks[torch.arange(len(block), device=block.device), block].cumsum(dim=-1, dtype=torch.float64)
    return block * _BLOCK + _first_beyond(inner, target - before)


def _first_beyond(edges: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[R]: the first index whose running sum ``edges`` [R, N] exceeds ``target`` [R], which rounding may have put a
    hair past the end."""
    last = edges[:, -1]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(edges, target[:, None], right=True).squeeze(-1)


def draw_restricted(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw from the top-k tokens and, of those, the nucleus top-p (arXiv:1904.09751), without sorting a vocabulary.

    Only the likeliest few hundred tokens are looked at; rows where those do not provably hold all that may be drawn
    are done again with more. The k-th token's ties all count as top-k; of a tie at the nucleus' edge, lower ids go
    first.

    Args:
        logits: [R, V]; a row must have a finite maximum.
        top_k: [R] int64 on the CPU; 0 for no limit.
        top_p: [R]; 1 for no limit.
        uniform: [R], float64 in [0, 1).

    Returns:
        [R] int64 token ids.
    """
    rows, vocab = logits.shape
    top_k = torch.where(top_k >= vocab, 0, top_k)
    unlimited = bool((top_k == 0).any())
    width = max(_NUCLEUS if unlimited else 0, int(top_k.max()) + _TIES)
    top_k = top_k.to(logits.device)
    total = logits.logsumexp(dim=-1).double() if unlimited else torch.zeros_like(uniform)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    pending = torch.arange(rows, device=logits.device)
    while len(pending):
        width = min(width, vocab)
        values, ids = _leaders(logits[pending], width)
        weights, complete = _nucleus(values, total[pending], top_k[pending], top_p[pending])
        if width == vocab:
            complete = torch.ones_like(complete)
        choice = ids.gather(-1, draw(weights, uniform[pending])[:, None]).squeeze(-1)
        tokens[pending[complete]] = choice[complete]
        pending = pending[~complete]
        width *= _WIDEN
    return tokens


def _leaders(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest of each row, [R, C] values and ids, larger first, then lower id."""
    if width < logits.shape[-1]:
        # topk leaves ties in any order: put ids in order first, then sort without disturbing it.
        ids = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
        values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        return values, ids.gather(-1, order)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values, ids


def _nucleus(
    values: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the candidates, zero for those cut, and which rows are complete.

    Args:
        values: [R, C], descending.
        total: [R], the log of the sum over the whole vocabulary; used where ``top_k`` is 0.

    Returns:
        [R, C] float64, not renormalised; [R] bool, whether all candidates past the last kept one are certain to be
        less likely than it, so that no token outside the candidates could have been kept.
    """
    limited = top_k > 0
    kth = values.gather(-1, (top_k - 1).clamp(0, values.shape[-1] - 1)[:, None])
    kept = (values > -math.inf) & (~limited[:, None] | (values >= kth))
    scores = values.double().masked_fill(~kept, -math.inf)
    probabilities = (scores - torch.where(limited, scores.logsumexp(dim=-1), total)[:, None]).exp()
    likelier = probabilities.cumsum(dim=-1) - probabilities
    kept &= likelier < top_p[:, None]
    kept[:, 0] = True
    last_kept = values.gather(-1, kept.sum(dim=-1, keepdim=True) - 1).squeeze(-1)
    return probabilities * kept, values[:, -1] < last_kept
