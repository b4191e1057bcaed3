"""Putting new rows into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelbay_triton.launch import OPTIONS, padded

_TILE = 1024


@triton.jit
def _write_cache_kernel(
    rows, cache, slots, size, rows_stride, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < size
    slot = tl.load(slots + token)
    place = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
    tl.store(place + column, tl.load(rows + token * rows_stride + column, mask=mask), mask=mask)


def write_cache(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See `modelbay_runtime.kernels.ops.write_cache`. The cache may have any strides with a dense last dimension."""
    tokens, size = rows.shape
    if not tokens:
        return
    tile = min(padded(size), _TILE)
    _write_cache_kernel[(tokens, -(-size // tile))](
        rows, cache, slots, size, rows.stride(0), cache.stride(0), cache.stride(1),
        BLOCK_SIZE=cache.shape[1], TILE=tile, **OPTIONS,
    )  # fmt: skip
