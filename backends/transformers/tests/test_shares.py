"""X5: which operations give a share of what they give for the whole. Every claim is checked on numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from modelbay_transformers.lockstep import Lockstep, Log
from modelbay_transformers.shares import NotShared, Share, mark_share, share_of

RANKS = 2
#: 11 tokens, 4 heads of 6: what a projection to heads gives.
X = torch.randn(1, 11, 24, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(24, generator=torch.Generator().manual_seed(1))
SQUARE = torch.randn(11, 11, generator=torch.Generator().manual_seed(2))

Function = Callable[[torch.Tensor], torch.Tensor]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, 11, -1, 6).transpose(1, 2)


SHARED: dict[str, Function] = {
    "elementwise": lambda x: F.silu(x) * x + 2,
    "heads": heads,
    "heads with their number": lambda x: x.view(1, 11, x.shape[-1] // 6, 6),
    "norm in a head": lambda x: heads(x) * heads(x).pow(2).mean(-1, keepdim=True).rsqrt(),
    "rotation": lambda x: torch.cat((-heads(x)[..., 3:], heads(x)[..., :3]), -1),
    "softmax over tokens": lambda x: x.softmax(1),
    "softmax in a head": lambda x: heads(x).softmax(-1),
    "repeated heads": lambda x: heads(x)[:, :, None].expand(1, -1, 3, 11, 6).reshape(1, -1, 11, 6),
    "layer norm in a head": lambda x: F.layer_norm(heads(x), (6,)),
    "back from heads": lambda x: heads(x).transpose(1, 2).reshape(1, 11, -1),
    "products of heads": lambda x: heads(x) @ heads(x).transpose(2, 3),
    "tokens mixed": lambda x: SQUARE @ x[0],
    "zeros of its shape": lambda x: torch.zeros(x.shape) + x,
    "first tokens": lambda x: x[:, :5],
    "split in heads": lambda x: heads(x).split([2, 4], -1)[1],
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(heads(x).unflatten(-1, (3, 2)).contiguous())),
}
REFUSED: dict[str, Function] = {
    "norm over all heads": lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "softmax over features": lambda x: x.softmax(-1),
    "layer norm over all heads": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "halves": lambda x: x.chunk(2, -1)[0],
    "the first features": lambda x: x[..., : x.shape[-1] // 2],
    "heads inside of their size": lambda x: x.view(1, 11, 6, -1),
    "a fixed number of heads": lambda x: x.view(1, 11, 4, -1),
    "largest": lambda x: x.topk(3, -1).values,
    "sum": lambda x: x.sum(),
    "running sum": lambda x: x.cumsum(-1),
    "turned around": lambda x: x.flip(-1),
    "gathered": lambda x: x.gather(-1, torch.zeros(1, 11, 1, dtype=torch.long)),
    "product with its features": lambda x: x[0].t() @ x[0],
    "heads behind tokens": lambda x: x.view(1, -1, 6),
    "a parameter of all": lambda x: x * WEIGHT[: x.shape[-1]],
    "joined with itself": lambda x: torch.cat((x, x), -1),
}


def run_ranks(function: Function, sections: tuple[int, ...] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
    log = Log()
    with torch.no_grad(), log:
        whole = function(X)
    parts = []
    for rank in range(RANKS):
        pieces = [section.chunk(RANKS, -1)[rank] for section in X.split(sections or (24,), -1)]
        part = torch.cat(pieces, -1).contiguous()
        mark_share(part, Share(2, RANKS, frozenset(("q",)), sections))
        with torch.no_grad(), Lockstep(log.entries):
            parts.append(function(part))
    return whole, parts


@pytest.mark.parametrize("name", SHARED)
def test_a_share_stays_one_and_is_that_of_the_whole(name: str) -> None:
    whole, parts = run_ranks(SHARED[name])
    for rank, part in enumerate(parts):
        share = share_of(part)
        assert share is not None
        torch.testing.assert_close(part, whole.chunk(RANKS, share.dim)[rank])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_share_of_the_whole_is_refused(name: str) -> None:
    with pytest.raises((NotShared, RuntimeError)):
        run_ranks(REFUSED[name])


@pytest.mark.parametrize(
    "function",
    [lambda x: x.split([x.shape[-1] // 3] * 3, -1)[1], lambda x: x.view(1, 11, 3, -1, 2)],
    ids=["split", "counted by a dimension"],
)
def test_sections_taken_apart_are_shares_of_each(function: Function) -> None:
    whole, parts = run_ranks(function, (8, 8, 8))
    for rank, part in enumerate(parts):
        share = share_of(part)
        assert share is not None
        torch.testing.assert_close(part, whole.chunk(RANKS, share.dim)[rank])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(1, 11, -1, 6),
        lambda x: x[..., : x.shape[-1] // 3],
        lambda x: x.chunk(2, -1)[0],
        lambda x: x * WEIGHT[: x.shape[-1]],
    ],
    ids=["heads", "slice", "halves", "a parameter of all"],
)
def test_sections_are_not_taken_for_one_thing(function: Function) -> None:
    with pytest.raises(NotShared):
        run_ranks(function, (8, 8, 8))


def test_what_is_done_to_each_element_leaves_the_sections() -> None:
    """A bias or a factor before q, k and v are taken apart."""
    whole, parts = run_ranks(lambda x: x * 2, (8, 8, 8))
    for rank, part in enumerate(parts):
        share = share_of(part)
        assert share is not None
        assert share.sections == (8, 8, 8)
        expected = [section.chunk(RANKS, -1)[rank] for section in whole.split(8, -1)]
        torch.testing.assert_close(part, torch.cat(expected, -1))
