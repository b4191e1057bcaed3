"""W4: weights that stay in 8 bits: products equal those with the weight written out, however ranks cut blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelbay.errors import ConfigError
from modelbay.plugins import load_plugins
from modelbay.weights.fp8 import BlockScales, fp8_blocks
from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels import blocks as kernels
from modelbay_runtime.kernels.experts import experts
from modelbay_runtime.kernels.table import KernelTable
from modelbay_runtime.layers.linear import Linear, PackedLinear
from modelbay_runtime.layers.moe import Experts
from modelbay_runtime.load_targets import find_targets
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_testing.ranks import run_ranks

E4M3 = torch.float8_e4m3fn


def written_out(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Element by element."""
    rows, columns = weight.shape[-2:]
    found = torch.empty(weight.shape)
    for i in range(rows):
        for j in range(columns):
            found[..., i, j] = weight[..., i, j].float() * scales[..., i // block[0], j // block[1]]
    return found


@given(
    rows=st.integers(1, 14),
    columns=st.integers(1, 14),
    tokens=st.integers(0, 4),
    tile=st.sampled_from((1, 40, 1 << 20)),
    block=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kind=st.sampled_from((E4M3, torch.float8_e5m2)),
)
@settings(max_examples=60, deadline=None)
def test_w4_a_product_is_that_of_the_weight_written_out(
    rows: int, columns: int, tokens: int, tile: int, block: tuple[int, int], kind: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    weight = torch.randn(rows, columns, generator=generator).to(kind)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.5
    x, bias = torch.randn(tokens, columns, generator=generator), torch.randn(rows, generator=generator)
    residual = torch.randn(tokens, rows, generator=generator)
    expected = F.linear(x, written_out(weight, scales, block), bias) + residual
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_TILE", tile)
        found = kernels.linear_blocks(x, weight, scales, block, bias, residual.clone())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_w4_every_value_of_8_bits_is_read_as_torch_reads_it() -> None:
    """The table on CPU, NaN included: a damaged weight must not turn into a number."""
    for kind in (E4M3, torch.float8_e5m2):
        weight = torch.arange(256, dtype=torch.uint8).view(kind).view(16, 16)
        found = kernels.dequantised(weight, torch.ones(1, 1), (16, 16), torch.float32)
        torch.testing.assert_close(found, weight.float(), equal_nan=True, rtol=0, atol=0)


@pytest.fixture(scope="module")
def table() -> KernelTable:
    return KernelTable(load_plugins(None), torch.device("cpu"), torch.float32)


def held(table: KernelTable, context: ParallelContext, make: Any, block: tuple[int, int]) -> tuple[Any, dict]:
    """A layer that holds blocks, filled with this rank's slices of values that depend on names alone."""
    facts: Any = SimpleNamespace()
    build = BuildContext(facts, torch.float32, torch.device("cpu"), table, context)
    layer: nn.Module = make(build)
    layer.hold_blocks(build, BlockScales("float8_e4m3fn", block))  # type: ignore[operator]
    state = {}
    for name, target in find_targets(layer, tie=False).by_name.items():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        value = state[name] = torch.randn(target.whole_shape(), generator=generator).to(target.storage.dtype)
        if target.shard is not None:
            value = value.narrow(target.shard.dim, target.shard.start, target.shard.size)
        if target.storage.tensor.is_meta:
            target.storage.materialise(torch.device("cpu"))
        target.view().copy_(value)
    layer.post_load()  # type: ignore[operator]
    return layer, state


BLOCKS = [(4, 4), (3, 5), (5, 3), (8, 7), (64, 64), (1, 1), (6, 6)]
MESHES = [Mesh(), Mesh(tp=2), Mesh(tp=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("style", ["replicated", "colwise", "rowwise"])
def test_w4_ranks_cut_within_a_block(style: str, block: tuple[int, int], mesh: Mesh, table: KernelTable) -> None:
    x, residual = torch.randn(3, 12), torch.randn(3, 20)

    def run(context: ParallelContext) -> torch.Tensor:
        layer, state = held(table, context, lambda b: Linear(b, 12, 20, style=style), block)
        mine = x.chunk(context.tp_size, 1)[context.tp_rank] if style == "rowwise" else x
        rest = residual.chunk(context.tp_size, 1)[context.tp_rank] if style == "colwise" else residual
        y = layer(mine, rest.clone())
        if style == "colwise":
            y = context.tp.all_gather(y)
        expected = F.linear(x, written_out(state["weight"], state["weight_scale_inv"], block)) + residual
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
        return y

    run_ranks(mesh, run)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("block", BLOCKS)
def test_w4_sections_have_blocks_of_their_own(block: tuple[int, int], mesh: Mesh, table: KernelTable) -> None:
    """Two heads for k at TP 4: two ranks hold the same blocks."""
    x, parts = torch.randn(3, 10), {"q": 24, "k": 8}

    def run(context: ParallelContext) -> None:
        layer, state = held(table, context, lambda b: PackedLinear(b, 10, parts, heads={"q": 8, "k": 2}), block)
        found = layer(x).split([section.size for section in layer.packed], 1)
        for name, y in zip(parts, found, strict=True):
            expected = F.linear(x, written_out(state[f"{name}.weight"], state[f"{name}.weight_scale_inv"], block))
            start = layer.shards[f"{name}.weight"].start if context.tp_size > 1 else 0
            torch.testing.assert_close(y, expected[:, start : start + y.shape[1]], atol=1e-5, rtol=1e-5)

    run_ranks(mesh, run)


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(tp=2, expert_parallel=True), Mesh(dp=2, expert_parallel=True)], ids=str)
@pytest.mark.parametrize("block", [(4, 4), (3, 5), (8, 7), (64, 64)])
def test_w4_experts_sliced_or_spread(block: tuple[int, int], mesh: Mesh, table: KernelTable) -> None:
    x, ids, weights = torch.randn(5, 10), torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]]), torch.rand(5, 2)

    def run(context: ParallelContext) -> None:
        layer, state = held(table, context, lambda b: Experts(b, 4, 10, 12, "silu"), block)
        gate, up, down = (
            written_out(state[name], state[f"{name}_scale_inv"], block)
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        expected = experts(x, torch.cat((gate, up), 1), down, ids, weights, "silu")
        torch.testing.assert_close(layer(x, ids, weights), expected, atol=1e-4, rtol=1e-4)

    run_ranks(mesh, run)


def test_w4_scales_are_no_parameters_of_the_model_and_take_their_bytes(table: KernelTable) -> None:
    layer, _ = held(table, ParallelContext(), lambda b: Linear(b, 256, 512), (128, 128))
    assert {p.dtype for p in layer.parameters()} == {E4M3, torch.float32}
    assert sum(p.nbytes for p in layer.parameters()) == 512 * 256 + 4 * 2 * 4


def test_c11_a_kind_of_float_that_is_not_known_is_refused() -> None:
    said = {"quant_method": "fp8", "weight_block_size": [4, 3], "fmt": "e3m4"}
    with pytest.raises(ConfigError, match="fmt 'e3m4'; known are e4m3, e5m2"):
        fp8_blocks(SimpleNamespace(quantization=said))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "skipped"),
    [("model.layers.3.self_attn.q_proj", True), ("model.layers.30.self_attn.q_proj", False), ("lm_head", True),
     ("model.layers.1.mlp.gate", True), ("model.layers.1.mlp.gate_proj", False)],
)  # fmt: skip
def test_c11_modules_not_to_convert(name: str, skipped: bool) -> None:
    said = {"weight_block_size": [4, 3], "modules_to_not_convert": ["model.layers.3", "lm_head", "gate"]}
    assert fp8_blocks(SimpleNamespace(quantization=said)).skips(name) is skipped  # type: ignore[arg-type]
