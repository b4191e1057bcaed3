"""A request's output depends on nothing but the request: not on its batch, chunks, blocks, cache, or preemption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelbay import LLM, SamplingParams
from modelbay_testing.recording import Reference, record_logits

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
NAMES = ["llama", "mistral-window", "qwen2-mixed"]


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def alone(name: str, open_llm: Callable[..., LLM], prompts: list[Any]) -> list[list[int]]:
    """What each prompt gives by itself, with nothing cached."""
    llm = open_llm(name, enable_prefix_caching=False)
    return [token_ids(llm.generate([prompt], GREEDY))[0] for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 100},
        {"max_num_batched_tokens": 16, "enable_chunked_prefill": False},
        {"max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"block_size": 1},
        {"block_size": 5},
        {"block_size": 64, "max_num_batched_tokens": 50},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_output_does_not_depend_on_how_the_engine_is_set_up(
    name: str, options: dict[str, Any], alone: list[list[int]], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    llm = open_llm(name, **options)
    assert token_ids(llm.generate(prompts, GREEDY)) == alone
    assert token_ids(llm.generate(prompts[::-1], GREEDY)) == alone[::-1]
    pool = llm.engine.kv.pool
    assert pool.num_free == pool.num_usable


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 32, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 48, "block_size": 4},
    ],
    ids=str,
)
def test_output_does_not_depend_on_preemption(
    name: str,
    options: dict[str, Any],
    alone: list[list[int]],
    checkpoint: Callable[..., Any],
    open_llm: Callable[..., LLM],
    prompts: list[Any],
) -> None:
    """A pool that just holds the longest sequence: the others are pushed out, and start over from their tokens."""
    layout = open_llm(name, **options).engine.kv.layout
    blocks = layout.blocks_for(256, options["max_num_batched_tokens"]) + 1
    tight = {"max_model_len": 256, "kv_cache_memory_bytes": blocks * layout.page_elements() * 4}
    llm = open_llm(name, **options, **tight)
    longer = [*prompts, *prompts]
    with record_logits(llm) as recording:
        outputs = llm.generate(longer, GREEDY)
    assert token_ids(outputs) == alone + alone
    assert llm.engine.scheduler.num_preemptions > 0
    assert sum(output.metrics.num_preemptions for output in outputs) == llm.engine.scheduler.num_preemptions
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable == blocks - 1
    reference = Reference(checkpoint(name))
    for output in outputs:
        if output.metrics.num_preemptions:
            expected = reference.logits([*output.prompt_token_ids, *output.outputs[0].token_ids])
            assert recording.worst_difference(output.request_id, expected) <= 1e-4


def test_arriving_while_others_run_changes_nothing(
    name: str, alone: list[list[int]], open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    """Streams that begin at different steps and take turns on one engine, with a whole batch in between."""
    llm = open_llm(name, max_num_batched_tokens=40)
    streams = {0: llm.stream(prompts[0], GREEDY)}
    last: dict[int, Any] = {}
    for turn in range(40):
        if turn % 3 == 0 and turn // 3 < len(prompts):
            streams[turn // 3] = llm.stream(prompts[turn // 3], GREEDY)
        if turn == 7:
            assert token_ids(llm.generate(prompts, GREEDY)) == alone
        for index, stream in list(streams.items()):
            last[index] = next(stream, last.get(index))
    for index, stream in streams.items():
        for output in stream:
            last[index] = output
    assert token_ids([last[index] for index in range(len(prompts))]) == alone
    assert llm.engine.kv.pool.num_free == llm.engine.kv.pool.num_usable


@pytest.mark.parametrize("caching", [True, False])
def test_seeded_requests_give_the_same_whatever_the_batch(
    caching: bool, open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    llm = open_llm("llama", enable_prefix_caching=caching)
    params = [
        SamplingParams(
            temperature=1.2, top_p=0.9, top_k=20, seed=index, n=1 + index % 3, max_tokens=12, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    single = [token_ids(llm.generate([prompt], [params[index]])) for index, prompt in enumerate(prompts)]
    together = llm.generate(prompts, params)
    assert [token_ids([output]) for output in together] == single
    assert [[c.index for c in output.outputs] for output in together] == [list(range(p.n)) for p in params]
    # The siblings of one request differ, and so do two requests that differ in the seed alone.
    assert all(len({tuple(ids) for ids in found}) == len(found) for found in single)
    other = llm.generate([prompts[0]], params[0].replace(seed=99))
    assert token_ids(other) != single[0]


def test_unseeded_requests_repeat_with_the_engine_and_differ_from_each_other(
    open_llm: Callable[..., LLM], prompts: list[Any]
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = (open_llm("llama", seed=5).generate([prompts[0]] * 3, params) for _ in range(2))
    other = open_llm("llama", seed=6).generate([prompts[0]] * 3, params)
    assert token_ids(first) == token_ids(second)
    assert len({tuple(ids) for ids in token_ids(first) + token_ids(other)}) == 6


def test_siblings_share_their_prompt(open_llm: Callable[..., LLM], prompts: list[Any]) -> None:
    """The second to fourth output of a prompt find its full blocks computed."""
    llm = open_llm("llama")
    with record_logits(llm) as recording:
        (output,) = llm.generate(
            [prompts[4]], SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
        )
    length = len(prompts[4]["prompt_token_ids"])
    assert recording.positions(output.request_id)[:length] == list(range(length))
    for index in (1, 2, 3):
        assert recording.positions(output.request_id, index)[0] == (length - 1) // 16 * 16
    assert output.metrics.num_cached_tokens == 3 * ((length - 1) // 16 * 16)
