"""What every launch shares: padded sizes, the type that tensor cores multiply, options."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Whether the kernels of this process are interpreted. Fixed when Triton is imported, hence a constant.
INTERPRETED = not isinstance(tl.zeros, triton.JITFunction)

#: Products and sums may be contracted, as the torch kernels do it; said here because Triton's default is moving.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The type of the operands of ``tl.dot`` (sums are float32). The interpreter cannot compute in bfloat16."""
    if dtype == torch.float16:
        return tl.float16
    if dtype == torch.bfloat16 and not INTERPRETED:
        return tl.bfloat16
    return tl.float32


def padded(size: int, least: int = 1) -> int:
    """The next power of two, at least ``least``."""
    return max(least, triton.next_power_of_2(size))
