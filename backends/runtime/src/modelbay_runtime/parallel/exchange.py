"""Tokens sent to the ranks that hold their experts, and their results sent back.

Legend: t tokens of this rank, n tokens that came in, H hidden size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelbay_runtime.parallel.groups import Group

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def exchange(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, held: int, group: Group, compute: Compute
) -> torch.Tensor:
    """The weighted sum over each token's experts, wherever they are.

    A token goes once to each rank that holds any of its experts, and one vector comes back: what those gave, weighed
    and summed there. Every rank of the group takes part, with no tokens if it has none.

    Args:
        x: [t, H]. ids: [t, k] int64. weights: [t, k] float32.
        held: how many experts each rank of ``group`` has, in order.
        compute: ``(x [n, H], ids [n, k], weights [n, k]) -> [n, H]``, passing over the experts of other ranks.

    Returns:
        [t, H] in x's dtype, summed in float32.
    """
    goes = torch.zeros(x.shape[0], group.size, dtype=torch.bool, device=x.device)
    goes.scatter_(1, ids // held, True)
    _, tokens = goes.t().nonzero(as_tuple=True)  # in order of the ranks they go to
    outgoing, one_each = goes.sum(0), [1] * group.size
    send = outgoing.tolist()
    receive = group.all_to_all(outgoing, one_each, one_each).tolist()
    choices = torch.cat((ids.float(), weights), 1)  # one message; a float32 holds every number of an expert
    visitors = group.all_to_all(x[tokens], send, receive)
    ids, weights = group.all_to_all(choices[tokens], send, receive).chunk(2, 1)
    results = group.all_to_all(compute(visitors, ids.long(), weights), receive, send)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, tokens, results.float()).to(x.dtype)
