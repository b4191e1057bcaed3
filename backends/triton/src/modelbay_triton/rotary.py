"""Rotary position embedding in place. Legend: T tokens, N heads, D head size, R rotary dimensions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelbay_triton.launch import OPTIONS, padded

_TILE = 4096


@triton.jit
def _rotary_kernel(
    x, cos, sin, heads, x_token_stride, x_head_stride, cos_stride, sin_stride,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    real = column < HALF
    mask = (head < heads)[:, None] & real[None, :]
    low = x + token * x_token_stride + head[:, None] * x_head_stride + column[None, :]
    first = tl.load(low, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(low + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_row, sin_row = cos + token * cos_stride + column, sin + token * sin_stride + column
    cos_first = tl.load(cos_row, mask=real, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_row + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_row, mask=real, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_row + HALF, mask=real, other=0.0).to(tl.float32)[None, :]
    dtype = x.dtype.element_ty
    tl.store(low, (first * cos_first + second * sin_first).to(dtype), mask=mask)
    tl.store(low + HALF, (second * cos_second + first * sin_second).to(dtype), mask=mask)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `modelbay_runtime.kernels.ops.rotary`."""
    tokens, heads, _ = x.shape
    half = cos.shape[-1] // 2
    if not tokens:
        return
    block_half = padded(half)
    block_heads = min(padded(heads), max(1, _TILE // block_half))
    _rotary_kernel[(tokens, -(-heads // block_heads))](
        x, cos, sin, heads, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
        HALF=half, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, **OPTIONS,
    )  # fmt: skip
