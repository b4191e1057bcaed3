"""The small ops against the torch reference in float32."""

from __future__ import annotations

import pytest
import torch

from modelbay_runtime.kernels import ops
from modelbay_triton.activation import act_and_mul
from modelbay_triton.cache import write_cache
from modelbay_triton.norm import rms_norm
from modelbay_triton.rotary import rotary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
#: One unit in the last place of a stored result: the interpreter truncates.
_ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape, dtype, device, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(device, dtype)


def assert_stored(got, want):
    """``want`` is float32 from the same inputs."""
    torch.testing.assert_close(got.float(), want, atol=1e-5, rtol=_ULP[got.dtype])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (5, 576), (2, 5000), (70, 128)], ids=str)
def test_rms_norm(device, dtype, shape):
    x, weight = random(*shape, dtype=dtype, device=device, scale=3.0), random(shape[-1], dtype=dtype, device=device)
    assert_stored(rms_norm(x, weight, 1e-5), ops.rms_norm(x.float(), weight.float(), 1e-5))


def test_rms_norm_adds_eps_to_the_mean_square(device):
    x, weight = torch.full((2, 8), 1e-4, device=device), torch.ones(8, device=device)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    assert rms_norm(x, weight, 1e-6).max() < 0.2


@pytest.mark.parametrize("view", ["slice", "heads", "transposed"])
def test_rms_norm_of_a_view(device, view):
    x = random(6, 4, 32, dtype=torch.float32, device=device)
    x = {"slice": x.flatten(1)[:, 32:96], "heads": x[:, 1:3], "transposed": x.transpose(1, 2)}[view]
    weight = random(x.shape[-1], dtype=torch.float32, device=device)
    assert_stored(rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize(("size", "turned"), [(16, 16), (24, 24), (32, 8)])
def test_rotary_in_place(device, dtype, size, turned):
    product = random(5, 9, size, dtype=dtype, device=device)
    x = product[:, 2:9]  # the slice of a product that holds queries and keys
    angles = torch.outer(torch.arange(5.0), 10.0 ** -torch.arange(turned // 2))
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None].to(device, dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None].to(device, dtype)
    want = x.float()
    ops.rotary(want, cos.float(), sin.float())
    untouched = product[:, :2].clone()
    rotary(x, cos, sin)
    assert_stored(x, want)
    assert torch.equal(product[:, :2], untouched)


@DTYPES
@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_act_and_mul(device, dtype, activation):
    x = random(3, 200, dtype=dtype, device=device, scale=2.0)
    assert_stored(act_and_mul(x, activation), ops.act_and_mul(x.float(), activation))


def test_act_and_mul_of_a_view_wider_than_a_tile(device):
    x = random(2, 5000, dtype=torch.float32, device=device)[:, 100:4300]
    assert_stored(act_and_mul(x, "silu"), ops.act_and_mul(x, "silu"))


@DTYPES
@pytest.mark.parametrize("padding", [0, 8])
def test_write_cache_touches_its_slots_only(device, dtype, padding):
    width = 1100
    rows = random(4, width + 7, dtype=dtype, device=device)[:, 7:]
    slots = torch.tensor([0, 33, 17, 95], device=device)
    cache = torch.zeros(6, 16, width + padding, dtype=dtype, device=device)
    want = cache.clone()
    ops.write_cache(rows, want[..., :width], slots)
    write_cache(rows, cache[..., :width], slots)
    assert torch.equal(cache, want)
    assert cache.any(-1).sum() == 4


@pytest.mark.parametrize("tokens", [0])
def test_no_tokens(device, tokens):
    x = torch.empty(tokens, 32, device=device)
    assert rms_norm(x, torch.ones(32, device=device), 1e-5).shape == (0, 32)
    assert act_and_mul(x, "silu").shape == (0, 16)
    rotary(x.view(0, 2, 16), torch.empty(0, 1, 16, device=device), torch.empty(0, 1, 16, device=device))
    write_cache(x, torch.zeros(1, 16, 32, device=device), torch.empty(0, dtype=torch.int64, device=device))
