"""Rounds under way at the same time, as the stages of a pipeline need them; and lanes, as replicas do.

One process computes them one after the other, which changes nothing for the engine in front of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay_runtime.engine.executor import InlineExecutor
from modelbay_runtime.engine.lanes import Lane, choose_lane
from modelbay_runtime.engine.sequence import Sequence

_GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [(11 * i * j + j) % 200 + 3 for i in range(5 + 3 * j)]} for j in range(count)]


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def deep(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Opens engines that keep two rounds under way."""

    def open_deep(**options: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr(InlineExecutor, "depth", 2)
            llm = open_llm("llama", **options)
        llm.engine.executor.depth = 2
        return llm

    return open_deep


def record(llm: LLM) -> list[tuple[str, list[Any]]]:
    """What the executor is asked for, in order."""
    executor: Any = llm.engine.executor
    submit, collect = executor.submit, executor.collect
    log: list[tuple[str, list[Any]]] = []

    def logged_submit(batches: Any) -> None:
        log.append(("submit", list(batches[0].owners)))
        submit(batches)

    def logged_collect() -> Any:
        log.append(("collect", []))
        return collect()

    executor.submit, executor.collect = logged_submit, logged_collect
    return log


def test_two_rounds_are_under_way_and_share_the_sequences(
    deep: Callable[..., LLM], open_llm: Callable[..., LLM]
) -> None:
    expected = ids(open_llm("llama").generate(prompts(4), _GREEDY, use_tqdm=False))
    llm = deep()
    log = record(llm)
    assert ids(llm.generate(prompts(4), _GREEDY, use_tqdm=False)) == expected
    assert [what for what, _ in log[:3]] == ["submit", "submit", "collect"]  # before the first is done
    first, second = set(log[0][1]), set(log[1][1])
    assert len(first) == len(second) == 2
    assert not first & second  # a sequence is in one of them


def test_one_sequence_alone_is_never_in_two_rounds(deep: Callable[..., LLM], open_llm: Callable[..., LLM]) -> None:
    expected = ids(open_llm("llama").generate(prompts(1), _GREEDY, use_tqdm=False))
    llm = deep(max_num_batched_tokens=4)  # its prompt takes several rounds, one after the other
    log = record(llm)
    assert ids(llm.generate(prompts(1), _GREEDY, use_tqdm=False)) == expected
    assert [what for what, _ in log] == ["submit", "collect"] * (len(log) // 2)


def test_a_small_cache_preempts_nobody_who_is_under_way(deep: Callable[..., LLM], open_llm: Callable[..., LLM]) -> None:
    expected = ids(open_llm("llama").generate(prompts(8), _GREEDY, use_tqdm=False))
    llm = deep()
    block = llm.engine.kv.layout.page_elements() * llm.engine.cache.tensors[0].element_size()
    llm = deep(kv_cache_memory_bytes=9 * block, max_model_len=64, max_num_batched_tokens=32)
    assert ids(llm.generate(prompts(8), _GREEDY, use_tqdm=False)) == expected
    assert llm.engine.scheduler.num_preemptions
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable


def test_a_request_given_up_while_it_is_under_way(deep: Callable[..., LLM], open_llm: Callable[..., LLM]) -> None:
    expected = ids(open_llm("llama").generate(prompts(4), _GREEDY, use_tqdm=False))
    llm = deep()
    streams = [llm.stream(prompt, _GREEDY) for prompt in prompts(4)]
    for stream in streams:
        next(stream)
    assert llm.engine._rounds  # one is under way now
    streams[1].close()
    streams[3].close()
    rest = [list(stream)[-1] for stream in (streams[0], streams[2])]
    assert ids(rest) == [expected[0], expected[2]]
    assert ids(llm.generate(prompts(4), _GREEDY, use_tqdm=False)) == expected
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable
    assert not llm.engine.requests


# ---- lanes ---------------------------------------------------------------------------------------------------------


def lanes_of(*llms: LLM) -> list[Lane]:
    return [llm.engine.lanes[0] for llm in llms]


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence("new", 0, len(token_ids), token_ids)


def test_d1_a_request_goes_where_least_is_waiting(open_llm: Callable[..., LLM]) -> None:
    first, second = open_llm("llama"), open_llm("llama")
    lanes = lanes_of(first, second)
    assert choose_lane(lanes, sequence([5] * 20)) == 0  # of equals the first
    lanes[0].scheduler.add(sequence([7] * 30))
    assert choose_lane(lanes, sequence([5] * 20)) == 1
    lanes[1].scheduler.add(sequence([7] * 40))
    assert choose_lane(lanes, sequence([5] * 20)) == 0


def test_d1_a_request_goes_where_its_beginning_is_cached(open_llm: Callable[..., LLM]) -> None:
    first, second = open_llm("llama"), open_llm("llama")
    lanes = lanes_of(first, second)
    prompt = [(3 * i) % 200 + 3 for i in range(64)]
    second.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert choose_lane(lanes, sequence([*prompt, 9])) == 1
    lanes[1].scheduler.add(sequence([7] * 100))  # as long as it does not wait longer for it
    assert choose_lane(lanes, sequence([*prompt, 9])) == 0
