"""The torch reference of attention without a cache: every token of a sequence sees every other, or those nearby.

Legend: T tokens, N query heads, K kv heads, D head size, E value head size.
"""

from __future__ import annotations

import torch

from modelbay_runtime.kernels.attention import AttentionSpec, attend_rectangle
from modelbay_runtime.step import KVGroupStep, Step


def encoder_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor | None,
    step: Step,
    group: KVGroupStep | None,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bidirectional attention within each sequence of the step; a sequence is in the step as a whole.

    Args:
        q: [T, N, D]. rows: [T, K * (D + E)]. ``cache`` and ``group`` are None.
        spec: its ``window`` w lets a token see those at a distance below w, on both sides.

    Returns:
        [T, N, E].
    """
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_size)
    begin = 0
    for length, count in _runs(step.query_lens):
        tokens = slice(begin, begin + count * length)
        begin += count * length
        keys, values = spec.split_rows(rows[tokens].unflatten(0, (count, length)))
        queries = q[tokens].unflatten(0, (count, length)).transpose(1, 2)
        mask = None
        if spec.window is not None and length > spec.window:
            key = ("nearby", length, spec.window, q.dtype)
            mask = step.cached(key, lambda n=length: _nearby(n, spec.window, q))  # type: ignore[misc]
        result = attend_rectangle(queries, keys, values, mask, False, spec, sinks)
        out[tokens] = result.transpose(1, 2).flatten(0, 1)
    return out


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """[5, 5, 3] -> [(5, 2), (3, 1)]: neighbours of equal length go together, so nothing is padded."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        else:
            runs.append((length, 1))
    return runs


def _nearby(length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """[length, length] to add to scores: 0 where two positions are less than ``window`` apart, else -inf."""
    position = torch.arange(length, device=like.device)
    far = (position[:, None] - position[None, :]).abs() >= window
    return torch.zeros(far.shape, dtype=like.dtype, device=like.device).masked_fill_(far, float("-inf"))
