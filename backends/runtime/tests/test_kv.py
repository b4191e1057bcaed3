"""The cache's layout, its blocks, and which sequence holds which."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelbay_runtime.engine.block_pool import NULL_BLOCK, BlockPool
from modelbay_runtime.engine.kv_cache import KVCache
from modelbay_runtime.engine.kv_layout import plan_layout
from modelbay_runtime.engine.kv_manager import KVManager
from modelbay_runtime.engine.sequence import Sequence
from modelbay_runtime.kv_spec import FullKV, LatentKV, NoKV, SlidingKV, StateKV

FULL, SLIDING = FullKV(2, 8, 8), SlidingKV(2, 8, 8, 20)
LATENT, STATE = LatentKV(72), StateKV(1000)


def make_manager(specs, num_blocks=64, max_seqs=4, length=256, prefix_caching=True) -> KVManager:
    return KVManager(plan_layout(specs, 4), BlockPool(num_blocks), max_seqs, length, prefix_caching)


def make_sequence(tokens, **kwargs) -> Sequence:
    return Sequence("r", 0, len(tokens), list(tokens), **kwargs)


def compute(kv: KVManager, sequence: Sequence, count: int) -> bool:
    if not kv.grow(sequence, count):
        return False
    sequence.num_computed += count
    kv.publish(sequence)
    return True


def test_every_kind_side_by_side_has_rows_of_its_own_size() -> None:
    specs = {0: FULL, 1: SLIDING, 2: LATENT, 3: NoKV(), 4: STATE, 5: FULL}
    layout = plan_layout(specs, 4)
    assert {layer for group in layout.groups for layer in group.layers} == {0, 1, 2, 4, 5}
    cache = KVCache(layout, 7, torch.float32, torch.device("cpu"))
    assert 3 not in cache.views
    assert cache.views[4].shape == (7, 1, STATE.per_sequence)
    for layer in (0, 1, 2, 5):
        assert cache.views[layer].shape[0] == 7
        assert cache.views[layer].shape[2] == specs[layer].row
        assert cache.views[layer].shape[1] % 4 == 0
    assert cache.tensors[0].numel() == 7 * layout.page


def test_layers_of_different_groups_share_memory_and_layers_of_one_do_not() -> None:
    layout = plan_layout({0: FULL, 1: SLIDING, 2: FULL, 3: SLIDING}, 4)
    cache = KVCache(layout, 3, torch.float32, torch.device("cpu"))
    pointers = {layer: view.data_ptr() for layer, view in cache.views.items()}
    assert pointers[0] == pointers[1]
    assert pointers[2] == pointers[3]
    assert pointers[0] != pointers[2]


def test_a_narrow_layer_gets_longer_blocks_in_the_same_page() -> None:
    layout = plan_layout({0: FullKV(4, 16, 16), 1: FullKV(1, 16, 16)}, 4)
    assert [group.block_size for group in layout.groups] == [4, 16]
    assert [group.row_stride for group in layout.groups] == [128, 32]


@given(
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    state=st.integers(0, 5000),
)
@settings(max_examples=60, deadline=None)
def test_blocks_never_exceed_their_page(rows: list[int], counts: list[int], state: int) -> None:
    specs, layer = {}, 0
    for row, count in zip(rows, counts, strict=False):
        for _ in range(count):
            specs[layer] = LatentKV(row)
            layer += 1
    if state:
        specs[layer] = StateKV(state)
    layout = plan_layout(specs, 4)
    assert sorted(x for group in layout.groups for x in group.layers) == sorted(specs)
    for group in layout.groups:
        assert len(group.layers) <= layout.tensors
        if group.block_size is None:
            assert group.spec.per_sequence <= layout.page
        else:
            assert group.block_size * group.row_stride == layout.page
            assert group.row_stride >= group.spec.row
    KVCache(layout, 2, torch.float32, torch.device("cpu"))


def test_a_prefix_is_found_again_and_its_last_token_is_left_to_compute() -> None:
    kv = make_manager({0: FULL})
    first = make_sequence(range(16))
    assert kv.admit(first)
    assert compute(kv, first, 16)
    blocks = kv.tables(0, np.array([first.slot]), np.array([0]), np.array([16]))[0][0].tolist()
    kv.release(first)
    again = make_sequence(range(16))
    assert kv.admit(again)
    assert again.num_computed == again.num_cached == 12
    assert compute(kv, again, 4)
    assert kv.tables(0, np.array([again.slot]), np.array([12]), np.array([16]))[0][0].tolist()[:3] == blocks[:3]


def test_a_different_beginning_shares_nothing() -> None:
    kv = make_manager({0: FULL})
    first, other = make_sequence(range(16)), make_sequence([99, *range(1, 16)])
    for sequence in (first, other):
        assert kv.admit(sequence)
        assert sequence.num_computed == 0
        assert compute(kv, sequence, 16)


def test_a_window_gives_blocks_back_and_its_prefix_needs_only_the_window() -> None:
    kv = make_manager({0: SLIDING}, num_blocks=64)
    sequence = make_sequence(range(100))
    assert kv.admit(sequence)
    for _ in range(100):
        assert compute(kv, sequence, 1)
    held = 63 - kv.pool.num_free
    assert held <= SLIDING.window // 4 + 2
    kv.release(sequence)
    again = make_sequence(range(100))
    assert kv.admit(again)
    assert again.num_computed == 96
    table, first = kv.tables(0, np.array([again.slot]), np.array([96]), np.array([100]))
    assert first[0] == (96 - SLIDING.window + 1) // 4 * 4
    assert NULL_BLOCK not in table[0, : (96 - first[0]) // 4]


def test_a_state_is_one_block_and_turns_prefix_lookup_off() -> None:
    kv = make_manager({0: STATE, 1: FULL})
    assert not kv.prefix_caching
    sequence = make_sequence(range(40))
    assert kv.admit(sequence)
    free = kv.pool.num_free
    state, full = kv.layout.groups
    assert (state.block_size, full.spec) == (None, FULL)
    assert compute(kv, sequence, 40)
    assert free - kv.pool.num_free == 1 + -(-40 // full.block_size)


@pytest.mark.parametrize(
    "specs", [{0: FULL}, {0: FULL, 1: SLIDING}, {0: SLIDING, 1: LATENT, 2: FULL}, {0: STATE, 1: FULL}]
)
@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_shares_a_block_that_is_written_and_loses_none(specs, seed) -> None:
    chooser = random.Random(seed)
    kv = make_manager(specs, num_blocks=40, max_seqs=3)
    running: list[Sequence] = []
    prompts = [[chooser.randrange(3) for _ in range(60)] for _ in range(3)]
    for _ in range(400):
        if len(running) < 3 and chooser.random() < 0.3:
            prompt = chooser.choice(prompts)[: chooser.randrange(1, 60)]
            sequence = make_sequence(prompt)
            assert kv.admit(sequence)
            running.append(sequence)
        elif running:
            sequence = chooser.choice(running)
            left = len(sequence) - sequence.num_computed
            if not left:
                sequence.append(chooser.randrange(3))
                left = 1
            if len(sequence) > 100 or not compute(kv, sequence, chooser.randint(1, left)):
                kv.release(sequence)
                running.remove(sequence)
        _check_invariants(kv, running)
    for sequence in running:
        kv.release(sequence)
    assert kv.pool.num_free == kv.pool.num_usable


def _check_invariants(kv: KVManager, running: list[Sequence]) -> None:
    writers: dict[int, tuple] = {}
    held: set[int] = set()
    for sequence in running:
        for index, (group, holding) in enumerate(zip(kv.layout.groups, kv._holdings[sequence], strict=True)):
            live = [block for block in holding.blocks if block != NULL_BLOCK]
            held.update(live)
            assert len(set(live)) == len(live)
            if group.block_size is None:
                continue
            # Blocks that will still be written belong to one sequence and group alone; full ones may be shared
            # only by sequences with the same tokens up to there.
            for i in range(holding.first, len(holding.blocks)):
                known = (
                    tuple(sequence.token_ids[: (i + 1) * group.block_size])
                    if (i + 1) * group.block_size <= sequence.num_computed
                    else sequence
                )
                owner = writers.setdefault(holding.blocks[i], (index, known))
                assert owner == (index, known), "two sequences share a block whose content differs"
    assert len(held) + kv.pool.num_free == kv.pool.num_usable


def test_releasing_twice_is_a_bug_that_shows() -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken)
