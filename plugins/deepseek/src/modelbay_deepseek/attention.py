"""Multi-head latent attention (DeepSeek-AI, 2024, section 2.1): the kind "mla" and its torch reference.

A token keeps one vector for all heads: its latent and a rotated key. Keys and values of a head are linear in the
latent, so that there are two ways to attend, equal but for rounding:

* expanded: make keys and values of all heads from the latents, then attend as usual.
* absorbed: take queries into the latent's space and attend to the latents themselves; they are keys and values alike.

Legend: T tokens, t new tokens of a sequence, L its length, b sequences, N heads, P head size without position, R rotary
size, D = P + R, E value head size, C latent size; a row of the cache is C + R: latent, then rotated key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from modelbay_runtime.api import KVGroupStep, Step
from modelbay_runtime.kernels.attention import Decodes, causal_mask, plan_decodes, plan_prefills

#: Elements of the keys and values that are expanded at a time: a long prompt is attended a few heads after another.
_EXPANDED = 1 << 25


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The facts of one layer: N, P, R, E, C, and the scale of the softmax."""

    num_heads: int
    nope_size: int
    rope_size: int
    v_head_size: int
    latent_size: int
    scale: float

    @property
    def row(self) -> int:
        return self.latent_size + self.rope_size


def latent_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    group: KVGroupStep,
    spec: LatentSpec,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of the step's new tokens over everything their sequences have in the cache.

    Args:
        q: [T, N, D], its last R dimensions rotated. rows: [T, C + R], the new tokens' rows, already in ``cache``.
        cache: [blocks, block_size, C + R].
        weight: [N, P + E, C], from a latent to each head's key (without position) and value.

    Returns:
        [T, N, E].
    """
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_size)
    if step.num_decodes:
        for plan in group.cached(("decode", None, q.dtype), lambda: plan_decodes(step, group, None, q.dtype)):
            out[plan.rows] = _decode(q[plan.rows], cache, plan, spec, weight)
    for first, count in step.cached("prefills", lambda: plan_prefills(step)):
        length, context = step.query_lens[first], step.context_lens[first]
        begin = sum(step.query_lens[:first])
        tokens = slice(begin, begin + count * length)
        mask = None
        if length == context:
            latents = rows[tokens].unflatten(0, (count, length))
        else:
            latents = _gather(cache, group.block_tables[first : first + 1], context)
            key = ("mask", first, None, q.dtype)
            mask = group.cached(key, lambda n=length, m=context: causal_mask(n, m, 0, None, q.dtype, q.device))  # type: ignore[misc]
        attend = absorbed if absorbing_is_cheaper(length, context, spec) else expanded
        out[tokens] = attend(q[tokens].unflatten(0, (count, length)), latents, mask, spec, weight).flatten(0, 1)
    return out


def absorbing_is_cheaper(new: int, context: int, spec: LatentSpec) -> bool:
    """Which way takes fewer multiplications for the last ``new`` of ``context`` tokens.

    Both multiply by the weight, absorbing for each new token and expanding for each token of the context; then each
    pair of a query and a key costs what the vectors are long.
    """
    pairs = new * context - new * (new - 1) // 2
    weight = spec.latent_size * (spec.nope_size + spec.v_head_size)
    absorbed = new * weight + pairs * 2 * spec.row
    expanded = context * weight + pairs * (spec.nope_size + spec.rope_size + spec.v_head_size)
    return absorbed < expanded


def expanded(
    q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None, spec: LatentSpec, weight: torch.Tensor
) -> torch.Tensor:
    """q: [b, t, N, D]; latents: [b, L, C + R]; mask: [t, L] to add, None if t = L, causal -> [b, t, N, E]."""
    sequences, length = latents.shape[:2]
    size = spec.nope_size + spec.rope_size
    at_once = max(1, _EXPANDED // (sequences * length * (size + max(size, spec.v_head_size))))
    rotated = latents[:, None, :, spec.latent_size :]  # [b, 1, L, R]
    out = q.new_empty(*q.shape[:3], spec.v_head_size)
    for first in range(0, spec.num_heads, at_once):
        heads = slice(first, first + at_once)
        made = F.linear(latents[..., : spec.latent_size], weight[heads].flatten(0, 1))
        made = made.unflatten(-1, (-1, spec.nope_size + spec.v_head_size)).transpose(1, 2)  # [b, n, L, P + E]
        keys = torch.cat((made[..., : spec.nope_size], rotated.expand(-1, made.shape[1], -1, -1)), -1)
        # Padded to the keys' size: fused attention wants both alike, and unfused would hold all scores at once.
        values = F.pad(made[..., spec.nope_size :], (0, max(0, size - spec.v_head_size)))
        queries = q[:, :, heads].transpose(1, 2)
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=spec.scale
        )
        out[:, :, heads] = result[..., : spec.v_head_size].transpose(1, 2)
    return out


def absorbed(
    q: torch.Tensor, latents: torch.Tensor, mask: torch.Tensor | None, spec: LatentSpec, weight: torch.Tensor
) -> torch.Tensor:
    """The same by the other way."""
    queries = _to_latent(q.flatten(0, 1), spec, weight).unflatten(0, q.shape[:2]).transpose(1, 2)  # [b, N, t, C + R]
    rows = latents[:, None].expand(-1, spec.num_heads, -1, -1)
    result = F.scaled_dot_product_attention(
        queries, rows, rows, attn_mask=mask, is_causal=mask is None, scale=spec.scale
    )
    return _from_latent(result.transpose(1, 2).flatten(0, 1), spec, weight).unflatten(0, q.shape[:2])


def _decode(
    q: torch.Tensor, cache: torch.Tensor, plan: Decodes, spec: LatentSpec, weight: torch.Tensor
) -> torch.Tensor:
    """One new token each, absorbed: [b, N, D] -> [b, N, E]."""
    rows = cache.index_select(0, plan.blocks).view(plan.count, 1, -1, spec.row)[:, :, : plan.length]
    # The heads stand where several queries of one head would: a row is read once for all of them. The row serves as
    # value too, and what its rotated part gives is dropped.
    queries = _to_latent(q, spec, weight)[:, None]
    result = F.scaled_dot_product_attention(queries, rows, rows, attn_mask=plan.mask, scale=spec.scale)
    return _from_latent(result[:, 0], spec, weight)


def _to_latent(q: torch.Tensor, spec: LatentSpec, weight: torch.Tensor) -> torch.Tensor:
    """[T, N, D] -> [T, N, C + R]: what a query's product with a key is in terms of the row."""
    inner = torch.bmm(q[..., : spec.nope_size].transpose(0, 1), weight[:, : spec.nope_size])  # [N, T, C]
    return torch.cat((inner.transpose(0, 1), q[..., spec.nope_size :]), -1)


def _from_latent(mixed: torch.Tensor, spec: LatentSpec, weight: torch.Tensor) -> torch.Tensor:
    """[T, N, C + R], mixed rows -> [T, N, E], the mixed values."""
    values = weight[:, spec.nope_size :].transpose(1, 2)  # [N, C, E]
    return torch.bmm(mixed[..., : spec.latent_size].transpose(0, 1), values).transpose(0, 1)


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """One sequence's rows: [1, length, C + R]."""
    blocks = table[0, : -(-length // cache.shape[1])]
    return cache.index_select(0, blocks).view(1, -1, cache.shape[-1])[:, :length]
