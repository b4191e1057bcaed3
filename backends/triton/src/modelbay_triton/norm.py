"""Root mean square norm. Legend: T tokens, H size of the norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelbay_triton.launch import OPTIONS, padded

#: Elements that one program holds; short rows (query and key norms) share a program.
_TILE = 4096


@triton.jit
def _rms_norm_kernel(
    x, weight, out, rows, x_stride, eps, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_SIZE)
    mask = (row < rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    result = values * scale[:, None] * weights[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], result.to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `modelbay_runtime.kernels.ops.rms_norm`. Float32 inside, rounded once."""
    size = x.shape[-1]
    rows = x.reshape(-1, size) if x.dim() != 2 else x
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = rows.shape[0]
    if not count:
        return out
    block = padded(size)
    per_program = min(padded(count), max(1, _TILE // block))
    grid = (-(-count // per_program),)
    _rms_norm_kernel[grid](
        rows, weight, out, count, rows.stride(0), eps,
        SIZE=size, BLOCK_ROWS=per_program, BLOCK_SIZE=block, num_warps=4 if block <= _TILE else 8, **OPTIONS,
    )  # fmt: skip
    return out
