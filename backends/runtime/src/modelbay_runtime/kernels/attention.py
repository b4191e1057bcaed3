"""The torch reference of paged attention: full and sliding, decode and (chunked) prefill in one call.

Legend: T tokens, B sequences, M blocks, L keys, N query heads, K kv heads, G = N / K, D head size, E value head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from modelbay_runtime.step import KVGroupStep, Step

#: Sequences whose lengths differ by more than this factor are not padded to one length.
_MAX_PADDING = 2.0

#: Scores that attention written out holds at once, in float32 elements (64 MiB).
SCORE_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The facts of one attention layer; ``window`` counts the query itself (Transformers' meaning)."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, L, row] -> keys [b, K, L, D], values [b, K, L, E], as views."""
        split = self.num_kv_heads * self.head_size
        keys = rows[..., :split].unflatten(-1, (self.num_kv_heads, self.head_size)).transpose(1, 2)
        values = rows[..., split:].unflatten(-1, (self.num_kv_heads, self.v_head_size)).transpose(1, 2)
        return keys, values


@dataclass(frozen=True, slots=True)
class Decodes:
    """Decoding sequences that are attended together: their rows, their blocks, how many keys, which of them count."""

    rows: torch.Tensor | slice
    count: int
    blocks: torch.Tensor  # [b * M]
    length: int
    mask: torch.Tensor | None  # [b, 1, 1, L] added to the scores


def attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    group: KVGroupStep,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the step's new tokens over everything their sequences have in the cache.

    Tokens of one of the step's ``spans`` see each other both ways. A window still hides what lies before it, and
    nothing that comes later (what Transformers' masks of images do).

    Args:
        q: [T, N, D]. rows: [T, K * (D + E)], the new tokens' keys and values, already in ``cache``.
        cache: [blocks, block_size, K * (D + E)].
        sinks: [N] extra logit per head that takes probability and gives nothing.

    Returns:
        [T, N, E].
    """
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_size)
    if step.num_decodes:
        plans = group.cached(("decode", spec.window, q.dtype), lambda: plan_decodes(step, group, spec.window, q.dtype))
        for plan in plans:
            out[plan.rows] = _decode(q[plan.rows], cache, plan, spec, sinks)
    for first, count in step.cached("prefills", lambda: plan_prefills(step)):
        _prefill(out, q, rows, cache, step, group, spec, sinks, first, count)
    return out


def plan_decodes(step: Step, group: KVGroupStep, window: int | None, dtype: torch.dtype) -> list[Decodes]:
    """Split decoding sequences so that none is padded beyond `_MAX_PADDING` times its length."""
    lengths = step.seq_lens[: step.num_decodes] - group.first_position[: step.num_decodes]
    host = lengths.tolist()
    order = sorted(range(step.num_decodes), key=host.__getitem__)
    plans, begin = [], 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and host[order[end]] <= _MAX_PADDING * max(host[order[begin]], 64):
            end += 1
        plans.append(_plan_one(order[begin:end], host, step, group, window, dtype))
        begin = end
    return plans


def _plan_one(
    members: list[int], host: list[int], step: Step, group: KVGroupStep, window: int | None, dtype: torch.dtype
) -> Decodes:
    everyone = len(members) == step.num_decodes
    if everyone:
        members = list(range(step.num_decodes))
    index = torch.tensor(members, device=group.block_tables.device)
    longest, shortest = max(host[i] for i in members), min(host[i] for i in members)
    num_blocks = -(-longest // group.block_size)
    blocks = group.block_tables.index_select(0, index)[:, :num_blocks].flatten()
    mask = None
    if longest != shortest or (window is not None and longest > window):
        key = torch.arange(longest, device=index.device) + group.first_position[index, None]  # [b, L] positions
        query = step.seq_lens[index, None] - 1
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=index.device).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :]
    return Decodes(slice(0, len(members)) if everyone else index, len(members), blocks, longest, mask)


def _decode(
    q: torch.Tensor, cache: torch.Tensor, plan: Decodes, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    gathered = cache.index_select(0, plan.blocks).view(plan.count, -1, cache.shape[-1])[:, : plan.length]
    keys, values = spec.split_rows(gathered)
    # The G query heads of one kv head stand where several queries would: keys are read once and never repeated.
    grouped = q.unflatten(1, (spec.num_kv_heads, -1))  # [b, K, G, D]
    if spec.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask, scale=spec.scale)
    else:
        heads = None if sinks is None else sinks.view(spec.num_kv_heads, -1, 1)
        out = _attend(grouped, keys, values, plan.mask, spec, heads)
    return out.flatten(1, 2)


def plan_prefills(step: Step) -> list[tuple[int, int]]:
    """(first sequence, count): neighbours of equal length without context go together, unless spans tell them apart."""
    runs: list[tuple[int, int]] = []
    previous = None
    alike = step.spans is None
    for i in range(step.num_decodes, step.num_seqs):
        shape = (step.query_lens[i], step.context_lens[i])
        if runs and alike and shape == previous and shape[0] == shape[1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
        previous = shape
    return runs


def _prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    group: KVGroupStep,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    first: int,
    count: int,
) -> None:
    """Attend ``count`` sequences of equal shape, beginning with sequence ``first``."""
    length, context = step.query_lens[first], step.context_lens[first]
    begin = sum(step.query_lens[:first])
    tokens = slice(begin, begin + count * length)
    if length == context:
        gathered, start = rows[tokens].unflatten(0, (count, length)), 0
    else:
        start = group.cached("first_position", group.first_position.tolist)[first]
        blocks = group.block_tables[first, : -(-(context - start) // group.block_size)]
        gathered = cache.index_select(0, blocks).view(1, -1, cache.shape[-1])[:, : context - start]
    keys, values = spec.split_rows(gathered)
    queries = q[tokens].unflatten(0, (count, length)).transpose(1, 2)  # [b, N, t, D]
    spans = None if step.spans is None else step.spans[tokens]
    causal = spans is None and length == context and (spec.window is None or length <= spec.window)
    mask = None
    if not causal or spec.softcap is not None or sinks is not None:
        key = ("mask", first, spec.window, q.dtype)
        mask = group.cached(key, lambda: causal_mask(length, context, start, spec.window, q.dtype, q.device, spans))
        causal = False
    result = attend_rectangle(queries, keys, values, mask, causal, spec, sinks)
    out[tokens] = result.transpose(1, 2).flatten(0, 1)


def attend_rectangle(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Queries [b, N, t, D] over keys [b, K, L, D] and values [b, K, L, E] -> [b, N, t, E].

    ``causal`` stands for a mask, and is not used together with one, soft-cap or sinks.
    """
    if spec.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=True
        )
    assert not causal, "attention written out takes its mask as a tensor"
    groups = spec.num_heads // spec.num_kv_heads
    keys, values = keys.float().repeat_interleave(groups, 1), values.float().repeat_interleave(groups, 1)
    heads = None if sinks is None else sinks.view(-1, 1, 1)
    # A few queries at a time: the scores of a long chunk over a long context would not fit anywhere.
    rows = max(1, SCORE_ELEMENTS // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
    parts = [
        _attend(part, keys, values, None if mask is None else mask[i * rows : (i + 1) * rows], spec, heads)
        for i, part in enumerate(queries.split(rows, dim=2))
    ]
    return torch.cat(parts, 2)


def causal_mask(
    length: int,
    context: int,
    start: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    spans: torch.Tensor | None = None,
) -> torch.Tensor:
    """[length, context - start] to add to scores: the last ``length`` of ``context`` positions against keys from
    position ``start`` on. ``spans``: [length], see `Step.spans`."""
    query = torch.arange(context - length, context, device=device)[:, None]
    key = torch.arange(start, context, device=device)[None, :]
    hidden = key > query
    if spans is not None:
        hidden[:, -length:] &= ~((spans[:, None] == spans[None, :]) & (spans[:, None] >= 0))
    if window is not None:
        hidden = hidden | (key <= query - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for what the fused one does not know: soft-cap (Gemma 2) and sinks (gpt-oss)."""
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask.float()
    if sinks is not None:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, values.float()).to(q.dtype)
