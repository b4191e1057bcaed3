"""Paged attention, full and sliding, decode and (chunked) prefill: which tiles there are, and their launch.

Legend: T tokens, N query heads, K kv heads, G = N / K, D head size, E value head size, S splits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from modelbay_runtime.kernels.attention import AttentionSpec
from modelbay_runtime.step import KVGroupStep, Step
from modelbay_triton.attention_kernels import attend_kernel, combine_kernel
from modelbay_triton.launch import OPTIONS, dot_dtype, padded

#: `tl.dot` multiplies tiles of at least this many rows.
_LEAST_ROWS = 16
#: Rows of a prefill tile with two bytes per element; with four, half of that fits.
_PREFILL_ROWS = 64
#: A split shorter than this many keys costs more to join than it saves.
_LEAST_SPLIT = 256
_MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one launch.

    Attributes:
        table: [tiles, 2] int32, sequence and first token of each tile.
        tokens: how many tokens a tile covers.
        longest: length of the longest sequence among them.
    """

    table: torch.Tensor
    tokens: int
    block_rows: int
    longest: int


def attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    group: KVGroupStep,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `modelbay_runtime.kernels.attention.attention`; everything is read from the cache, nothing from ``rows``."""
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_size)
    if q.stride(-1) != 1:
        q = q.contiguous()
    if step.num_decodes:
        tiles = _decode_tiles(step, spec)
        keys = min(tiles.longest, spec.window or tiles.longest)
        splits = num_splits(keys, step.num_decodes * spec.num_kv_heads, q.device)
        attend(out, q, cache, step, group, spec, sinks, tiles, splits)
    if step.num_decodes < step.num_seqs:
        attend(out, q, cache, step, group, spec, sinks, _prefill_tiles(step, spec, q.dtype))
    return out


def attend(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    step: Step,
    group: KVGroupStep,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    tiles: Tiles,
    splits: int = 1,
) -> None:
    """Fill the rows of ``out`` [T, N, E] that belong to ``tiles``. With several splits these must be the first rows,
    one token per tile: the decoding sequences."""
    count = tiles.table.shape[0]
    block_d, block_e = padded(spec.head_size, 16), padded(spec.v_head_size, 16)
    block_keys = _block_keys(max(block_d, block_e), q.dtype)
    keys = tiles.longest
    if spec.window is not None:
        keys = min(keys, spec.window + tiles.tokens)
    split_keys = -(-keys // (splits * block_keys)) * block_keys
    partial = partial_lse = None
    if splits > 1:
        partial = out.new_empty(count, spec.num_heads, splits, spec.v_head_size, dtype=torch.float32)
        partial_lse = out.new_empty(count, spec.num_heads, splits, dtype=torch.float32)
    attend_kernel[(count, spec.num_kv_heads, splits)](
        q, cache, out, partial, partial_lse, tiles.table, step.query_start, step.seq_lens,
        group.first_position, group.block_tables, sinks,
        spec.scale, spec.softcap or 1.0, split_keys,
        q.stride(0), q.stride(1), cache.stride(0), cache.stride(1), group.block_tables.stride(0),
        NUM_HEADS=spec.num_heads, GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_SIZE=spec.head_size, V_HEAD_SIZE=spec.v_head_size,
        WINDOW=spec.window or 0, HAS_SOFTCAP=spec.softcap is not None, HAS_SINKS=sinks is not None, SPLITS=splits,
        PAGE=group.block_size, TOKENS=tiles.tokens, DOT=dot_dtype(q.dtype),
        BLOCK_ROWS=tiles.block_rows, BLOCK_KEYS=block_keys, BLOCK_D=block_d, BLOCK_E=block_e,
        num_warps=4, num_stages=2, **OPTIONS,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(count, spec.num_heads)](
            out, partial, partial_lse,
            NUM_HEADS=spec.num_heads, V_HEAD_SIZE=spec.v_head_size, SPLITS=splits,
            BLOCK_SPLITS=padded(splits), BLOCK_E=block_e, **OPTIONS,
        )  # fmt: skip


def num_splits(keys: int, programs: int, device: torch.device) -> int:
    """Into how many parts to split the longest decoding sequence's ``keys``, when there are ``programs`` without
    splitting: enough for two programs on every multiprocessor, none of them too short."""
    wanted = -(-2 * _multiprocessors(device) // programs)
    return max(1, min(wanted, keys // _LEAST_SPLIT, _MOST_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _block_keys(block_d: int, dtype: torch.dtype) -> int:
    """Keys of one round: as many as shared memory holds twice, on the smallest devices too."""
    return max(16, min(64, 64 * 128 * 2 // (block_d * dtype.itemsize)))


def _decode_tiles(step: Step, spec: AttentionSpec) -> Tiles:
    def table() -> torch.Tensor:
        table = torch.zeros(step.num_decodes, 2, dtype=torch.int32, device=step.seq_lens.device)
        table[:, 0] = torch.arange(step.num_decodes, device=table.device)
        return table

    rows = padded(spec.num_heads // spec.num_kv_heads, _LEAST_ROWS)
    return _cached(step, slice(0, step.num_decodes), 1, rows, table)


def _prefill_tiles(step: Step, spec: AttentionSpec, dtype: torch.dtype) -> Tiles:
    group = spec.num_heads // spec.num_kv_heads
    block_rows = padded(group, _PREFILL_ROWS * 2 // dtype.itemsize)
    tokens = block_rows // group

    def table() -> torch.Tensor:
        tiles = [
            (sequence, token)
            for sequence in range(step.num_decodes, step.num_seqs)
            for token in range(0, step.query_lens[sequence], tokens)
        ]
        return torch.tensor(tiles, dtype=torch.int32, device=step.seq_lens.device)

    return _cached(step, slice(step.num_decodes, None), tokens, block_rows, table)


def _cached(step: Step, sequences: slice, tokens: int, block_rows: int, table: Callable[[], torch.Tensor]) -> Tiles:
    """Layers of one step share their tiles."""
    key = ("triton tiles", sequences.start, tokens, block_rows)
    if key not in step.scratch:
        step.scratch[key] = Tiles(table(), tokens, block_rows, max(step.context_lens[sequences]))
    return step.scratch[key]
