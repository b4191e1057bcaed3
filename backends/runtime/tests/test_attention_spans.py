"""X10: tokens of one span see each other both ways, in full and in sliding layers."""

from __future__ import annotations

import pytest
import torch

from modelbay_runtime.kernels.attention import AttentionSpec, attention
from modelbay_runtime.step import KVGroupStep, Step

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 16


def dense(q: torch.Tensor, rows: torch.Tensor, spec: AttentionSpec, spans: torch.Tensor) -> torch.Tensor:
    """One sequence, from its mask in words: [T, N, D], [T, K * 2D], [T] -> [T, N, D]."""
    length = len(q)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1)[0] for part in spec.split_rows(rows[None]))
    seen = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            together = spans[i] >= 0 and spans[i] == spans[j]
            seen[i, j] = (j <= i or together) and (spec.window is None or j > i - spec.window)
    scores = torch.einsum("tnd,nld->ntl", q, keys) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("ntl,nld->tnd", weights, values)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("context", [0, 7])
def test_x10_spans_are_seen_both_ways(window: int | None, softcap: float | None, context: int) -> None:
    """Two sequences of equal length with spans in different places, the second one after ``context`` tokens."""
    torch.manual_seed(0)
    spec = AttentionSpec(HEADS, KV_HEADS, SIZE, SIZE, SIZE**-0.5, window, softcap)
    new = 12
    lengths = [new, new + context]
    spans = [torch.full((length,), -1) for length in lengths]
    spans[0][2:9] = 0
    spans[1][context + 4 : context + 10] = 1
    q = [torch.randn(length, HEADS, SIZE) for length in lengths]
    rows = [torch.randn(length, KV_HEADS * 2 * SIZE) for length in lengths]
    cache = torch.zeros(5, BLOCK, KV_HEADS * 2 * SIZE)
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    for table, own in zip(tables, rows, strict=True):
        for place, row in enumerate(own):
            cache[table[place // BLOCK], place % BLOCK] = row
    slots = torch.cat([tables[i, torch.arange(n - new, n) // BLOCK] * BLOCK + torch.arange(n - new, n) % BLOCK
                       for i, n in enumerate(lengths)])  # fmt: skip
    group = KVGroupStep(slots.long(), tables, torch.zeros(2, dtype=torch.int32), BLOCK)
    step = Step(
        positions=torch.cat([torch.arange(n - new, n) for n in lengths]),
        query_start=torch.tensor([0, new, 2 * new], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32), query_lens=[new, new], context_lens=lengths, num_decodes=0,
        spans=torch.cat([own[-new:] for own in spans]).int(),
    )  # fmt: skip
    found = attention(
        torch.cat([own[-new:] for own in q]), torch.cat([own[-new:] for own in rows]), cache, step, group, spec
    )
    for i in range(2):
        wanted = dense(q[i], rows[i], spec, spans[i])[-new:]
        assert torch.allclose(found[i * new : (i + 1) * new], wanted, atol=1e-5)
    causal = Step(**{name: getattr(step, name) for name in step.__dataclass_fields__ if name != "scratch"})
    causal.spans, group.scratch = None, {}
    plain = attention(
        torch.cat([own[-new:] for own in q]), torch.cat([own[-new:] for own in rows]), cache, causal, group, spec
    )
    # Tokens before a span are as they were, the first of one is not.
    assert torch.allclose(found[:2], plain[:2], atol=1e-6)
    assert not torch.allclose(found[2], plain[2], atol=1e-3)
