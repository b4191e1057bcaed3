"""The CPU's own forms of ops against the reference."""

from __future__ import annotations

import pytest
import torch

from modelbay_runtime.kernels import cpu, onednn, ops
from modelbay_runtime.kernels.experts import experts


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


@pytest.mark.skipif(onednn.available() is not None, reason=str(onednn.available()))
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_packed_one_by_one_are_the_references(tokens: int, dtype: torch.dtype) -> None:
    """Sizes that no register divides, and tokens whose experts another rank holds (number 4)."""
    if reason := onednn.constraint({"dtype": str(dtype).removeprefix("torch.")}):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(tokens)
    gate_up, down = torch.randn(4, 22, 37, generator=generator), torch.randn(4, 37, 11, generator=generator)
    x, weights = torch.randn(tokens, 37, generator=generator), torch.rand(tokens, 3, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(tokens)]) if tokens else None
    ids = torch.empty(0, 3, dtype=torch.int64) if ids is None else ids
    packed = [[onednn.experts.pack(each.to(dtype)) for each in weight] for weight in (gate_up, down)]
    found = onednn.experts(x.to(dtype), *packed, ids, weights, "silu")
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    exact = experts(x.float(), gate_up.float(), down.float(), ids, weights, "silu")
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    scale = float(exact.abs().max()) if tokens else 1.0
    torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance * scale)
