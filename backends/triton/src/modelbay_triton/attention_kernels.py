"""Attention over a paged cache, tile by tile: FlashAttention's running softmax (Dao, 2023), with split keys where few
queries would leave the device idle.

A tile is some consecutive new tokens of one sequence, times the G query heads that share one kv head: its rows. So
keys and values are read once for the whole group, and decoding is a tile of one token.

Legend: N query heads, K kv heads, G = N / K, D head size, E value head size, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
#: Stands for minus infinity in running maxima, where the difference of two must stay a number.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _tanh(x):
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def attend_kernel(
    q, cache, out, partial, partial_lse, tiles, query_start, seq_lens, first_position, block_tables, sinks,
    scale, softcap, split_keys,
    q_token_stride, q_head_stride, cache_block_stride, cache_token_stride, table_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, V_HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, DOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: one tile, one kv head, one split of the keys.

    tiles: [tiles, 2] sequence, and the tile's first token within the sequence's new tokens. With SPLITS > 1 the result
    goes to partial [T, N, S, E] and partial_lse [T, N, S] (base 2), else to out [T, N, E].
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    first_token = tl.load(tiles + 2 * tile + 1)
    row_begin = tl.load(query_start + sequence)
    new_tokens = tl.load(query_start + sequence + 1) - row_begin
    context = tl.load(seq_lens + sequence) - new_tokens
    first = tl.load(first_position + sequence)

    row = tl.arange(0, BLOCK_ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real_row = (row < TOKENS * GROUP) & (token < new_tokens)
    query_position = context + token
    column = tl.arange(0, BLOCK_D)
    v_column = tl.arange(0, BLOCK_E)
    out_row = (row_begin + token).to(tl.int64)
    queries = tl.load(
        q + out_row[:, None] * q_token_stride + head[:, None] * q_head_stride + column[None, :],
        mask=real_row[:, None] & (column < HEAD_SIZE)[None, :], other=0.0,
    ).to(DOT)  # fmt: skip

    highest = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    if HAS_SINKS:  # a key that only the first split sees, and that has no value
        sink = tl.load(sinks + head, mask=real_row, other=0.0).to(tl.float32) * _LOG2_E
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_E], tl.float32)

    begin = first
    if WINDOW > 0:
        begin = tl.maximum(begin, context + first_token - WINDOW + 1)
    end = context + tl.minimum(first_token + TOKENS, new_tokens)
    begin += split * split_keys
    end = tl.minimum(end, begin + split_keys)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        real_key = key < end
        offset = key - first
        page = tl.load(block_tables + sequence * table_stride + offset // PAGE, mask=real_key, other=0).to(tl.int64)
        place = page * cache_block_stride + (offset % PAGE) * cache_token_stride
        keys = tl.load(
            cache + place[None, :] + kv_head * HEAD_SIZE + column[:, None],
            mask=real_key[None, :] & (column < HEAD_SIZE)[:, None], other=0.0,
        ).to(DOT)  # fmt: skip
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = _tanh(scores / softcap) * softcap
        visible = real_key[None, :] & (key[None, :] <= query_position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores * _LOG2_E, float("-inf"))

        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        values = tl.load(
            cache + place[:, None] + (NUM_HEADS // GROUP) * HEAD_SIZE + kv_head * V_HEAD_SIZE + v_column[None, :],
            mask=real_key[:, None] & (v_column < V_HEAD_SIZE)[None, :], other=0.0,
        ).to(DOT)  # fmt: skip
        total = total * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(DOT), values, sums * decay[:, None], input_precision="ieee")
        highest = new_highest

    total = tl.where(total == 0.0, 1.0, total)  # a split that begins behind the end of a short sequence
    result = sums / total[:, None]
    mask = real_row[:, None] & (v_column < V_HEAD_SIZE)[None, :]
    if SPLITS == 1:
        place = out + (out_row * NUM_HEADS + head)[:, None] * V_HEAD_SIZE + v_column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=mask)
    else:
        part = (out_row * NUM_HEADS + head) * SPLITS + split
        tl.store(partial + part[:, None] * V_HEAD_SIZE + v_column[None, :], result, mask=mask)
        tl.store(partial_lse + part, highest + tl.log2(total), mask=real_row)


@triton.jit
def combine_kernel(
    out, partial, partial_lse,
    NUM_HEADS: tl.constexpr, V_HEAD_SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: one token and head. Joins splits in the ratio of their softmax sums."""
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, BLOCK_E)
    lse = tl.load(partial_lse + row * SPLITS + split, mask=split < SPLITS, other=_LOWEST)
    weights = tl.exp2(lse - tl.max(lse, 0))
    real = (split < SPLITS)[:, None] & (column < V_HEAD_SIZE)[None, :]
    parts = tl.load(partial + (row * SPLITS + split)[:, None] * V_HEAD_SIZE + column[None, :], mask=real, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * V_HEAD_SIZE + column, result.to(out.dtype.element_ty), mask=column < V_HEAD_SIZE)
