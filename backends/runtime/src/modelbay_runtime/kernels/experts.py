"""The torch reference of routed experts: tokens grouped by expert, only experts that were chosen are touched.

Legend: T tokens, H hidden size, E experts, I intermediate size of one expert, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from modelbay_runtime.kernels.ops import act_and_mul


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """``sum over a token's experts of weight * down(act(gate(x)) * up(x))``, summed in float32.

    Args:
        x: [T, H]. gate_up: [E, 2 I, H], gate before up. down: [E, H, I]. Where the implementation has a ``pack``, each
            is a list of E weights that it made of them.
        ids: [T, k] int64, no expert twice in a row; E for those that other ranks hold, which give nothing here.
        weights: [T, k] float32.

    Returns:
        [T, H] in x's dtype.
    """

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(act_and_mul(F.linear(rows, gate_up[number]), activation), down[number])

    return grouped(x, ids, weights, gate_up.shape[0], expert)


def grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum over each token's experts, each of which is given all of its tokens at once.

    Args:
        x, ids, weights: as for `experts`. count: E.
        expert: ``(number, [n, H]) -> [n, H]``, called in the order of numbers for those that have tokens.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = ids.flatten()
    pairs = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=count)[:count].tolist()
    tokens, scale = pairs // ids.shape[1], weights.flatten()[pairs, None]
    begin = 0
    for number, of_it in enumerate(counts):
        if not of_it:
            continue
        chosen = slice(begin, begin + of_it)
        begin += of_it
        out = expert(number, x.index_select(0, tokens[chosen]))
        # A token stands once in an expert's group, so the order of its sum is that of the experts, whatever the batch.
        total.index_add_(0, tokens[chosen], out * scale[chosen])
    return total.to(x.dtype)
