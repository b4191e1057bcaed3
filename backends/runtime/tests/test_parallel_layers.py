"""X9, D2: layers over several ranks give what one process gives: heads, vocabulary, experts, biases and residuals."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelbay.errors import UsageError
from modelbay.plugins import load_plugins
from modelbay_runtime.api import BuildContext
from modelbay_runtime.kernels.table import KernelTable
from modelbay_runtime.layers.attention import SelfAttention
from modelbay_runtime.layers.embedding import Embedding, Head
from modelbay_runtime.layers.linear import Linear, PackedLinear
from modelbay_runtime.layers.mlp import GatedMLP
from modelbay_runtime.layers.moe import RoutingSpec, SparseMoE
from modelbay_runtime.load_targets import find_targets
from modelbay_runtime.parallel.context import ParallelContext
from modelbay_runtime.parallel.mesh import Mesh
from modelbay_runtime.parallel.sizes import check_mesh, padded_share_of, share_of
from modelbay_testing.ranks import run_ranks

H = 8


@pytest.fixture(scope="module")
def table() -> KernelTable:
    return KernelTable(load_plugins(None), torch.device("cpu"), torch.float32)


def build(table: KernelTable, parallel: ParallelContext, **config: Any) -> BuildContext:
    facts: Any = SimpleNamespace(**config)
    return BuildContext(facts, torch.float32, torch.device("cpu"), table, parallel)


def fill(module: nn.Module, state: dict[str, torch.Tensor]) -> nn.Module:
    """What the loader does, by a second way: logical tensors are drawn by name, and each rank takes its slice."""
    for name, target in find_targets(module, tie=False).by_name.items():
        if name not in state:
            seed = sum(map(ord, name))
            state[name] = torch.randn(target.whole_shape(), generator=torch.Generator().manual_seed(seed))
        value, shard = state[name], target.shard
        if shard is not None:
            value = value.narrow(shard.dim, shard.start, shard.size)
            pad = [0, 0] * (value.ndim - shard.dim - 1) + [0, shard.pad]
            value = F.pad(value, pad, value=float("nan"))  # what is nobody's must not be seen
        if target.storage.tensor.is_meta:
            target.storage.materialise(torch.device("cpu"))
        target.view().copy_(value)
    return module


def on_ranks(table: KernelTable, mesh: Mesh, make: Callable[[BuildContext], nn.Module], run: Callable[..., Any]) -> Any:
    """``run(module, context)`` on every rank; with the result of one process first."""

    def one(context: ParallelContext) -> Any:
        return run(fill(make(build(table, context)), {}), context)

    return [one(ParallelContext()), *run_ranks(mesh, one)]


def assert_all_close(results: list[torch.Tensor]) -> None:
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("style", ["rowwise", "replicated"])
def test_a_bias_and_a_residual_are_added_once(style: str, table: KernelTable) -> None:
    x, residual = torch.randn(3, 12), torch.randn(3, H)

    def run(layer: nn.Module, context: ParallelContext) -> torch.Tensor:
        part = x.chunk(context.tp_size, 1)[context.tp_rank] if style == "rowwise" else x
        return layer(part, residual)

    assert_all_close(on_ranks(table, Mesh(tp=3), lambda b: Linear(b, 12, H, bias=True, style=style), run))


def test_packed_sections_are_each_cut_and_the_ops_see_local_sizes(table: KernelTable) -> None:
    x = torch.randn(3, H)
    parts = {"a": 8, "b": 4}

    def run(layer: Any, context: ParallelContext) -> torch.Tensor:
        y = layer(x)
        assert (layer.in_features, layer.out_features) == (H, 12 // context.tp_size)
        a, b = y.split([section.size for section in layer.packed], 1)
        return torch.cat((context.tp.all_gather(a), context.tp.all_gather(b)), 1)

    assert_all_close(on_ranks(table, Mesh(tp=4), lambda b: PackedLinear(b, H, parts, bias=True), run))


def test_case_32_four_kv_heads_at_tp_8(table: KernelTable) -> None:
    """Case 32, X9: two ranks hold the same KV head, that of their query heads, and keep it in their caches."""
    made: list[Any] = []
    config = {"hidden_size": H, "num_heads": 8, "num_kv_heads": 4, "head_size": 2, "layer_types": ("full",)}
    for rank in range(8):
        context = ParallelContext.apart(Mesh(tp=8), Mesh(tp=8).place(rank))
        made.append(fill(SelfAttention(build(table, context, **config, sliding_window=None), 0), {}))
    state: dict[str, torch.Tensor] = {}
    fill(SelfAttention(build(table, ParallelContext(), **config, sliding_window=None), 0), state)
    for rank, attention in enumerate(made):
        assert attention.attention.kv_spec.row == 2 * 2
        q, k, v = attention.qkv_proj.weight.split([2, 2, 2])
        for found, name, head in ((q, "q_proj", rank), (k, "k_proj", rank // 2), (v, "v_proj", rank // 2)):
            assert torch.equal(found, state[f"{name}.weight"][2 * head : 2 * head + 2])


@pytest.mark.parametrize(("vocab", "ranks"), [(11, 2), (13, 6), (5, 4), (3, 4), (12, 4)])
def test_x9_any_vocabulary_over_any_ranks(vocab: int, ranks: int, table: KernelTable) -> None:
    """Padding (NaN here) is in no embedding and no logit; ranks that are left without a token take part."""
    ids, x = torch.arange(vocab), torch.randn(3, H)

    def make(b: BuildContext) -> nn.Module:
        return nn.ModuleDict({"embed": Embedding(b, vocab, H), "head": Head(b, H, vocab, tied_to=None)})

    def run(model: Any, context: ParallelContext) -> torch.Tensor:
        logits = model["head"](x)
        assert logits.shape == (3, vocab)
        return torch.cat((model["embed"](ids).flatten(), logits.flatten()))

    assert_all_close(on_ranks(table, Mesh(tp=ranks), make, run))


def test_case_32_a_vocabulary_of_151552_at_tp_6(table: KernelTable) -> None:
    """Case 32: every row has one rank, and all ranks have as many."""
    heads: list[Any] = []
    for rank in range(6):
        context = ParallelContext.apart(Mesh(tp=6), Mesh(tp=6).place(rank))
        heads.append(Head(build(table, context), H, 151552, tied_to=None))
    assert {head.weight.shape[0] for head in heads} == {25259}
    covered = [row for head in heads for row in (head.shards["weight"].start, head.shards["weight"].size)]
    assert covered == [0, 25259, 25259, 25259, 50518, 25259, 75777, 25259, 101036, 25259, 126295, 25257]


def test_a_gated_mlp_is_one_all_reduce(table: KernelTable) -> None:
    x, residual = torch.randn(3, H), torch.randn(3, H)

    def run(mlp: nn.Module, context: ParallelContext) -> torch.Tensor:
        out = mlp(x, residual)
        assert context.tp_size == 1 or context.tp.traffic.calls == {"all_reduce": 1}
        return out

    assert_all_close(on_ranks(table, Mesh(tp=2), lambda b: GatedMLP(b, H, 12, "silu", bias=True), run))


MESHES = [
    Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, expert_parallel=True), Mesh(dp=2, expert_parallel=True),
    Mesh(dp=2, tp=2, expert_parallel=True), Mesh(dp=3, expert_parallel=True), Mesh(dp=2, tp=2),
]  # fmt: skip


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_experts_over_ranks(mesh: Mesh, shared: int, table: KernelTable) -> None:
    """Replicas have other tokens, and one has none; every token's sum is that of one process, and is counted once."""
    spec = RoutingSpec(12, 3, renormalise=True)
    xs = [torch.randn(count, H, generator=torch.Generator().manual_seed(count)) for count in (7, 0, 3)][: mesh.dp]

    def make(context: ParallelContext) -> Any:
        b = build(table, context)
        return fill(SparseMoE(b, H, 8, "silu", spec, shared_intermediate_size=shared), {})

    def run(context: ParallelContext) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
        moe, x = make(context), xs[context.place.dp_rank]
        return moe(x, x * 2), moe.expert_load, dict(context.tp.traffic.calls)

    single = make(ParallelContext())
    expected = [single(x, x * 2) for x in xs]
    ran = run_ranks(mesh, run)
    for rank, (out, _, calls) in enumerate(ran):
        torch.testing.assert_close(out, expected[mesh.place(rank).dp_rank], atol=1e-5, rtol=1e-5)
        assert mesh.tp == 1 or sum(calls.values()) <= 1, "one collective over the ranks that share the layer"
    loads = [load for _, load, _ in ran]
    if mesh.expert_parallel:
        assert torch.cat(loads).tolist() == single.expert_load.tolist()
    else:
        by_replica = [loads[mesh.rank(mesh.place(0).__class__(dp, 0, 0))] for dp in range(mesh.dp)]
        assert sum(by_replica).tolist() == single.expert_load.tolist()
    assert single.expert_load.sum() == 3 * sum(len(x) for x in xs)


def test_a_token_is_sent_once_to_each_rank_that_has_any_of_its_experts(table: KernelTable) -> None:
    """Bytes on the wire: rows of H, not one for each expert."""
    mesh, spec = Mesh(dp=2, expert_parallel=True), RoutingSpec(8, 6)  # six of eight: each rank has at least two

    def run(context: ParallelContext) -> int:
        b = build(table, context)
        fill(SparseMoE(b, H, 8, "silu", spec), {})(torch.randn(5, H), torch.zeros(5, H))
        return context.ep.traffic.bytes["all_to_all"]

    counts, choices, rows = 2 * 8, 10 * 12 * 4, 10 * H * 4
    assert run_ranks(mesh, run)[0] == counts + choices + 2 * rows


@given(st.integers(1, 64), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_shares_cover_everything_once(heads: int, ranks: int) -> None:
    padded = [padded_share_of(heads, rank, ranks) for rank in range(ranks)]
    assert [row for share in padded for row in range(share.start, share.start + share.size)] == list(range(heads))
    assert len({share.size + share.pad for share in padded}) == 1
    if heads % ranks and ranks % heads:
        with pytest.raises(UsageError, match=f"kv = {heads} does not divide over tensor_parallel_size = {ranks}"):
            share_of(heads * 4, 0, ranks, "kv", heads=heads)
        return
    shares = [share_of(heads * 4, rank, ranks, "kv", heads=heads) for rank in range(ranks)]
    assert {row for share in shares for row in range(share.start, share.start + share.size)} == set(range(heads * 4))
    assert all(share.size % 4 == 0 == share.start % 4 for share in shares)


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        (Mesh(tp=3), "tensor_parallel_size = 3: num_attention_heads 8 is not divisible by 3"),
        (Mesh(tp=8), "num_key_value_heads 6 and 8 ranks neither divides"),
        (Mesh(pp=5), "pipeline_parallel_size = 5: there are 4 layers"),
        (Mesh(dp=3, tp=2, expert_parallel=True), "16 experts are not divisible by .* = 3 × 2 = 6"),
        (Mesh(tp=4, pp=9), "intermediate_size 18 is not divisible by 4; pipeline_parallel_size = 9"),
    ],
)
def test_d1_what_does_not_divide_is_refused_with_the_numbers(mesh: Mesh, says: str) -> None:
    config: Any = SimpleNamespace(
        num_heads=8, num_kv_heads=6, intermediate_size=18 if mesh.pp == 9 else 64, num_layers=4, num_experts=16,
        vocab_size=10, get=lambda key: None,
    )  # fmt: skip
    with pytest.raises(UsageError, match=says):
        check_mesh(config, mesh)
    config.num_experts = None
    with pytest.raises(UsageError, match="the model has no experts"):
        check_mesh(config, Mesh(expert_parallel=True))
