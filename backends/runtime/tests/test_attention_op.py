"""The reference attention against attention written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from modelbay_runtime.kernels.attention import AttentionSpec, attention
from modelbay_runtime.kernels.ops import write_cache
from modelbay_runtime.step import KVGroupStep, Step

BLOCK = 4


def slow_attention(q, k, v, spec: AttentionSpec, sinks=None):
    """q: [t, N, D] for the last t of L positions; k, v: [L, K, D], [L, K, E]. One query, one head at a time."""
    total, new = k.shape[0], q.shape[0]
    out = torch.zeros(new, spec.num_heads, spec.v_head_size)
    group = spec.num_heads // spec.num_kv_heads
    for i in range(new):
        position = total - new + i
        low = 0 if spec.window is None else max(0, position - spec.window + 1)
        for head in range(spec.num_heads):
            keys = k[low : position + 1, head // group]
            scores = keys @ q[i, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            extra = torch.tensor([float("-inf")]) if sinks is None else sinks[head : head + 1]
            weights = torch.softmax(torch.cat((scores, extra)), 0)[:-1]
            out[i, head] = weights @ v[low : position + 1, head // group]
    return out


def make_case(shapes, spec: AttentionSpec, generator):
    """``shapes``: (new tokens, context length with them) per sequence, decodes first -> op arguments, expected."""
    row = spec.num_kv_heads * (spec.head_size + spec.v_head_size)
    firsts = [0 if spec.window is None else max(0, c - n - spec.window + 1) // BLOCK for n, c in shapes]
    blocks_each = [-(-c // BLOCK) for _, c in shapes]
    ids = iter((torch.randperm(sum(blocks_each), generator=generator) + 1).tolist())
    cache = torch.randn(sum(blocks_each) + 1, BLOCK, row, generator=generator)
    tables = torch.zeros(len(shapes), max(b - f for b, f in zip(blocks_each, firsts, strict=True)), dtype=torch.int32)
    slots, positions, new_rows, queries, everything = [], [], [], [], []
    for index, ((new, context), blocks, first) in enumerate(zip(shapes, blocks_each, firsts, strict=True)):
        table = [next(ids) for _ in range(blocks)]
        rows = torch.randn(context, row, generator=generator)
        at = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)])
        cache.view(-1, row)[at[: context - new]] = rows[: context - new]
        tables[index, : blocks - first] = torch.tensor(table[first:], dtype=torch.int32)
        slots.append(at[context - new :])
        positions.append(torch.arange(context - new, context))
        new_rows.append(rows[context - new :])
        queries.append(torch.randn(new, spec.num_heads, spec.head_size, generator=generator))
        everything.append(rows)
    lens = [new for new, _ in shapes]
    step = Step(
        positions=torch.cat(positions),
        query_start=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor([context for _, context in shapes], dtype=torch.int32),
        query_lens=lens,
        context_lens=[context for _, context in shapes],
        num_decodes=sum(new == 1 for new in lens),
    )
    group = KVGroupStep(torch.cat(slots), tables, torch.tensor(firsts, dtype=torch.int32) * BLOCK, BLOCK)
    q, rows = torch.cat(queries), torch.cat(new_rows)
    write_cache(rows, cache, group.slots)
    split = spec.num_kv_heads * spec.head_size
    keys = [r[:, :split].unflatten(1, (spec.num_kv_heads, -1)) for r in everything]
    values = [r[:, split:].unflatten(1, (spec.num_kv_heads, -1)) for r in everything]
    return (q, rows, cache, step, group, spec), (queries, keys, values)


SHAPES = {
    "one decode": [(1, 9)],
    "decodes of one length": [(1, 8), (1, 8), (1, 8)],
    "decodes of very different lengths": [(1, 1), (1, 3), (1, 130), (1, 70), (1, 200)],
    "equal prefills": [(5, 5), (5, 5)],
    "chunks with context": [(3, 10), (2, 21)],
    "all at once": [(1, 17), (1, 2), (4, 4), (4, 4), (7, 20), (2, 2)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "v_size"), [(6, 2, 8, 8), (4, 4, 8, 4)])
def test_equals_attention_written_out(shapes, window, softcap, with_sinks, heads, kv_heads, size, v_size) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    spec = AttentionSpec(heads, kv_heads, size, v_size, 1.3 / math.sqrt(size), window, softcap)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    arguments, (queries, keys, values) = make_case(shapes, spec, generator)
    found = attention(*arguments, sinks)
    expected = torch.cat([slow_attention(q, k, v, spec, sinks) for q, k, v in zip(queries, keys, values, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_stale_row_beyond_a_sequences_end_is_never_seen() -> None:
    spec = AttentionSpec(2, 1, 8, 8, 0.3)
    arguments, _ = make_case([(1, 5), (1, 2)], spec, torch.Generator().manual_seed(0))
    before = attention(*arguments)
    _, _, cache, step, group, _ = arguments
    step.scratch.clear()
    group.scratch.clear()
    for table, length in zip(group.block_tables.tolist(), step.context_lens, strict=True):
        cache[table[(length - 1) // BLOCK], (length - 1) % BLOCK + 1 :] = 1e4
    torch.testing.assert_close(attention(*arguments), before)


def test_attention_written_out_gives_the_same_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(6, 2, 8, 8, 0.4, None, 2.0)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(3))
    arguments, (queries, keys, values) = make_case([(9, 9), (7, 20)], spec, torch.Generator().manual_seed(0))
    monkeypatch.setattr("modelbay_runtime.kernels.attention.SCORE_ELEMENTS", 6 * 20 * 2)
    found = attention(*arguments, sinks)
    expected = torch.cat([slow_attention(q, k, v, spec, sinks) for q, k, v in zip(queries, keys, values, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
