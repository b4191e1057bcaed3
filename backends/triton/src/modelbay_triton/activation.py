"""Gated activations. Legend: T tokens, I intermediate size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelbay_triton.constraints import ACTIVATIONS
from modelbay_triton.launch import OPTIONS, padded

_TILE = 1024


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """x in float32."""
    if ACTIVATION == "silu":
        result = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(y)) is sigmoid(2 y); the constant is 2 sqrt(2 / pi).
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        result = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        result = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return result


@triton.jit
def _act_and_mul_kernel(x, out, size, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (_activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=mask)


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See `modelbay_runtime.kernels.ops.act_and_mul`. Float32 inside, rounded once."""
    size = x.shape[-1] // 2
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = min(padded(size), _TILE)
        _act_and_mul_kernel[(rows.shape[0], -(-size // block))](
            rows, out, size, rows.stride(0), ACTIVATION=ACTIVATIONS[activation], BLOCK=block, **OPTIONS
        )
    return out
