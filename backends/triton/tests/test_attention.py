"""Paged attention against the torch reference in float32. Lengths are (new tokens, length including them)."""

from __future__ import annotations

import pytest
import torch

from modelbay_runtime.kernels.attention import attention as reference
from modelbay_triton import attention as triton_attention
from modelbay_triton.launch import INTERPRETED

DECODES = [(1, 1), (1, 16), (1, 17), (1, 50)]
PREFILLS = [(5, 5), (33, 33), (7, 40)]
MIXED = [(1, 31), (1, 33), (16, 16), (20, 45)]


def check(case):
    """Compare, and return the output. In half precision only the rounding of the store is allowed when interpreted."""
    want = reference(*case.in_float32().arguments())
    got = triton_attention.attention(*case.arguments())
    assert got.shape == want.shape
    assert got.dtype == case.q.dtype
    torch.testing.assert_close(got.float(), want, **tolerance(case.q.dtype))
    return got


def tolerance(dtype):
    if dtype == torch.float32:
        return {"atol": 1e-5, "rtol": 1e-5}
    if dtype == torch.bfloat16 and INTERPRETED:  # multiplied in float32, stored truncated: one unit in the last place
        return {"atol": 1e-5, "rtol": 2**-7}
    return {"atol": 2e-3, "rtol": 2**-9} if dtype == torch.float16 else {"atol": 2e-2, "rtol": 2**-6}


@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("page", [16, 32])
def test_lengths_at_block_boundaries(make_paged, lengths, page):
    check(make_paged(lengths, page=page))


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (14, 2), (20, 1)], ids=["G1", "G3", "G7", "G20"])
def test_grouped_query_heads(make_paged, heads):
    check(make_paged([(1, 20), (1, 3), (23, 30)], heads=heads))


@pytest.mark.parametrize("sizes", [(32, 16), (16, 64), (24, 16), (80, 40)], ids=str)
def test_head_sizes_that_differ_or_are_no_power_of_two(make_paged, sizes):
    check(make_paged([(1, 20), (18, 18)], sizes=sizes))


@pytest.mark.parametrize("window", [1, 8, 16, 24, 100])
def test_window_counts_the_query_itself(make_paged, window):
    check(make_paged([(1, 9), (1, 40), (30, 30), (20, 50)], window=window))


@pytest.mark.parametrize("window", [8, 24])
def test_blocks_that_slid_out_of_the_window_are_not_read(make_paged, window):
    case = make_paged([(1, 70), (1, 5), (18, 60)], window=window, slid=True)
    assert case.group.first_position.max() > 0
    check(case)


def test_softcap(make_paged):
    lengths = [(1, 20), (18, 30)]
    capped = check(make_paged(lengths, softcap=0.5))
    assert not torch.allclose(capped, check(make_paged(lengths)), atol=1e-3)


@pytest.mark.parametrize("window", [None, 8])
def test_sinks_take_probability_and_give_nothing(make_paged, window):
    lengths = [(1, 20), (18, 30)]
    with_sinks = check(make_paged(lengths, heads=(6, 2), sinks=True, window=window))
    assert not torch.allclose(with_sinks, check(make_paged(lengths, heads=(6, 2), window=window)), atol=1e-3)


def test_everything_at_once(make_paged):
    check(
        make_paged(
            [(1, 40), (1, 7), (9, 9), (20, 61)],
            heads=(6, 2), sizes=(32, 16), window=20, softcap=2.0, sinks=True, slid=True, padding=8,
        )
    )  # fmt: skip


@pytest.mark.parametrize("padding", [1, 8])
def test_padded_row_stride(make_paged, padding):
    case = make_paged([(1, 20), (18, 30)], padding=padding)
    assert case.cache.stride(1) == case.cache.shape[2] + padding
    check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_off_by_the_store_only(make_paged, dtype):
    check(make_paged([(1, 33), (1, 16), (20, 40)], dtype=dtype, sizes=(32, 32)))


def test_one_long_prompt_takes_several_tiles(make_paged):
    check(make_paged([(150, 200)], heads=(3, 1)))


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"window": 100, "slid": True}, {"sinks": True, "softcap": 3.0}], ids=str)
def test_split_keys_join_to_the_same_result(make_paged, monkeypatch, splits, options):
    """Among the splits of the short sequence are empty ones."""
    monkeypatch.setattr(triton_attention, "num_splits", lambda *_: splits)
    check(make_paged([(1, 300), (1, 3), (1, 130), (4, 20)], heads=(3, 1), **options))


def test_layers_of_one_step_share_tiles(make_paged):
    case = make_paged(MIXED)
    check(case)
    tables = dict(case.step.scratch)
    check(case)
    assert len(tables) == 2
    assert all(case.step.scratch[key] is value for key, value in tables.items())


def test_number_of_splits_fills_the_device_and_keeps_splits_long(monkeypatch):
    monkeypatch.setattr(triton_attention, "_multiprocessors", lambda device: 100)
    device = torch.device("cuda")
    assert triton_attention.num_splits(100_000, 8, device) == 25
    assert triton_attention.num_splits(1024, 8, device) == 4
    assert triton_attention.num_splits(100, 8, device) == 1
    assert triton_attention.num_splits(100_000, 400, device) == 1
    assert triton_attention.num_splits(1_000_000, 1, device) == 32
