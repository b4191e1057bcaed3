"""Mixture of experts: the router against a direct, slow formula, and experts against one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay.errors import ConfigError
from modelbay_runtime.kernels.experts import experts
from modelbay_runtime.kernels.ops import rotary_interleaved
from modelbay_runtime.layers.moe import RoutingSpec, route


def slow_route(scores: list[float], spec: RoutingSpec, correction: list[float] | None) -> dict[int, float]:
    """One token, number by number: expert -> weight."""
    ranks = scores if correction is None else [a + b for a, b in zip(scores, correction, strict=True)]
    size = spec.experts // spec.groups
    groups = [list(range(first, first + size)) for first in range(0, spec.experts, size)]

    def group_rank(group: list[int]) -> float:
        return sum(sorted((ranks[expert] for expert in group), reverse=True)[: spec.group_members])

    kept = sorted(groups, key=group_rank, reverse=True)[: spec.top_groups] if spec.groups > 1 else groups
    allowed = sorted(expert for group in kept for expert in group)
    chosen = sorted(allowed, key=lambda expert: ranks[expert], reverse=True)[: spec.top_k]
    total = sum(scores[expert] for expert in chosen) if spec.renormalise else 1.0
    return {expert: scores[expert] / total * spec.scale for expert in chosen}


@st.composite
def routings(draw: st.DrawFn) -> tuple[RoutingSpec, list[list[float]], list[float] | None]:
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    top_groups = draw(st.integers(1, groups))
    spec = RoutingSpec(
        experts=groups * size,
        top_k=draw(st.integers(1, size * top_groups)) if groups > 1 else draw(st.integers(1, size)),
        scoring=draw(st.sampled_from(("softmax", "sigmoid"))),
        groups=groups,
        top_groups=top_groups,
        group_members=draw(st.integers(1, min(2, size))),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 2.5))),
    )
    # Few distinct values: ties are common.
    values = st.sampled_from((-2.0, -1.0, 0.0, 0.5, 1.0, 3.0))
    row = st.lists(values, min_size=spec.experts, max_size=spec.experts)
    logits = draw(st.lists(row, min_size=1, max_size=4))
    corrections = st.lists(st.sampled_from((0.0, 0.25, -0.5)), min_size=spec.experts, max_size=spec.experts)
    return spec, logits, draw(st.none() | corrections)


@given(routings())
@settings(max_examples=300, deadline=None)
def test_router_equals_the_slow_formula(routing: tuple[RoutingSpec, list[list[float]], list[float] | None]) -> None:
    """Ties included: of equal experts, and equal groups, the lowest number wins."""
    spec, logits, correction = routing
    # In float64, where a sum of two is the same here and there; so what is a tie in one is a tie in the other.
    values = torch.tensor(logits, dtype=torch.float64)
    scores = torch.softmax(values, -1) if spec.scoring == "softmax" else torch.sigmoid(values)
    bias = None if correction is None else torch.tensor(correction, dtype=torch.float64)
    ids, weights = route(values, spec, bias)
    assert ids.shape == weights.shape == (len(logits), spec.top_k)
    for row in range(len(logits)):
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(slow_route(scores[row].tolist(), spec, correction), rel=1e-9)


def test_ties_go_to_the_lowest_number() -> None:
    ids, weights = route(torch.zeros(2, 8), RoutingSpec(8, 3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 8))
    spec = RoutingSpec(8, 2, "sigmoid", groups=4, top_groups=2, group_members=2, renormalise=True, scale=2.5)
    correction = torch.tensor([0, 0, 0, 0, 0, 0, 1.0, 0])
    ids, weights = route(torch.zeros(1, 8), spec, correction)
    assert ids.tolist() == [[6, 0]]  # group 3 by its correction, group 0 by its number
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))  # the correction chooses and does not weigh


@given(tokens=st.integers(1, 12), count=st.integers(1, 6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_experts_equal_one_token_at_a_time(tokens: int, count: int, data: st.DataObject) -> None:
    top_k, hidden, inner = data.draw(st.integers(1, count)), 6, 5
    generator = torch.Generator().manual_seed(tokens * 10 + count)
    x = torch.randn(tokens, hidden, generator=generator)
    gate_up = torch.randn(count, 2 * inner, hidden, generator=generator)
    down = torch.randn(count, hidden, inner, generator=generator)
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (F.silu(gate) * up))
    found = experts(x, gate_up, down, ids, weights, "silu")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert experts(x.bfloat16(), gate_up.bfloat16(), down.bfloat16(), ids, weights, "silu").dtype == torch.bfloat16


def test_experts_that_nobody_chose_are_not_touched() -> None:
    gate_up, down = torch.randn(4, 10, 6), torch.randn(4, 6, 5)
    gate_up[2], down[2] = float("nan"), float("nan")
    ids = torch.tensor([[0, 1], [3, 0]])
    assert experts(torch.randn(2, 6), gate_up, down, ids, torch.rand(2, 2), "silu").isfinite().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": 3}, "8 experts do not divide into 3 groups"),
        ({"groups": 4, "top_groups": 5}, "5 of 4 groups"),
        ({"groups": 8, "top_groups": 4, "group_members": 2}, "ranked by 2 experts and has 1"),
        ({"top_k": 9}, "goes to 9 experts and may choose from 8"),
        ({"top_k": 0}, "goes to 0 experts"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "goes to 3 experts and may choose from 2"),
        ({"scoring": "tanh"}, "scored by 'tanh'"),
    ],
)
def test_routing_that_cannot_be_is_refused_with_its_numbers(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutingSpec(**{"experts": 8, "top_k": 2, **values})


def test_interleaved_rotation_turns_neighbours_and_leaves_the_rest() -> None:
    angles = torch.tensor([[0.3, 1.1], [2.0, -0.4]])  # [T, R / 2]
    cos, sin = angles.cos().repeat_interleave(2, 1)[:, None], angles.sin()
    signed = torch.stack((-sin, sin), -1).flatten(1)[:, None]
    x = torch.randn(2, 3, 9)
    turned = torch.view_as_complex(x[..., :4].unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(2, 1, 2), angles[:, None]
    )
    expected = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 4:]), -1)
    rotary_interleaved(x, cos, signed)
    torch.testing.assert_close(x, expected)
