"""The CPU's own forms of ops against the reference."""

from __future__ import annotations

import pytest
import torch

from modelbay_runtime.kernels import cpu, ops


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("size", [16, 576])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 0.0), (300.0, 0.0), (1.0, 50.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_few_rows_is_the_references(
    rows: int, size: int, scale: float, shift: float, dtype: torch.dtype
) -> None:
    """Small values too, where the epsilon counts, and a mean far from zero."""
    generator = torch.Generator().manual_seed(rows * size)
    x = (torch.randn(rows, size, generator=generator) * scale + shift).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    exact = ops.rms_norm(x.double(), weight.double(), 1e-5)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7  # bfloat16: one rounding before the weight, one after
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5).double(), exact, rtol=tolerance, atol=1e-6)
