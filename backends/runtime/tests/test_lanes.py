"""An engine in front of two replicas: what each is asked for, and what comes back (BEHAVIOUR D1, D2).

The replicas are two models of this process, so that what the engine does is tested without any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from modelbay import LLM, PoolingParams, SamplingParams
from modelbay.errors import EngineError
from modelbay_runtime.engine import engine as engine_module
from modelbay_runtime.engine.executor import Batches, InlineExecutor
from modelbay_runtime.engine.prompts import Prompt
from modelbay_runtime.engine.runner import BatchOutput

_GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
_BAD = 77


class TwoReplicas(InlineExecutor):
    """See `modelbay_runtime.engine.executor.Executor`."""

    lanes = 2

    def __init__(self, resolution: Any) -> None:
        super().__init__(resolution)
        self.other = InlineExecutor(resolution)
        self.closed = False

    def submit(self, batches: Batches) -> None:
        self._rounds.append(batches)  # type: ignore[arg-type]

    def collect(self) -> list[BatchOutput | None]:
        batches: Any = self._rounds.popleft()
        runners = (self.runner, self.other.runner)
        return [None if batch is None else runner.run(batch) for runner, batch in zip(runners, batches, strict=True)]

    def clear_cache(self) -> None:
        super().clear_cache()
        self.other.clear_cache()

    def apply(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [*super().apply(fn), *self.other.apply(fn)]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def replicas(open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def open_two(**options: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "open_executor", TwoReplicas)
            return open_llm("llama", max_model_len=128, **options)

    return open_two


def prompts(count: int) -> list[list[int]]:
    return [[(11 * i * j + j) % 60 + 3 for i in range(5 + 3 * j)] for j in range(count)]


def poisoned(model: Any) -> None:
    """Only requests with this token see NaN."""
    with torch.inference_mode():
        model.model.embed_tokens.weight[_BAD].fill_(math.nan)


def test_d2_two_replicas_say_what_one_says(replicas: Callable[..., LLM], open_llm: Callable[..., LLM]) -> None:
    """Tokens, prompts' log-probabilities, hidden states."""
    params = _GREEDY.replace(prompt_logprobs=2)
    alone, both = open_llm("llama", max_model_len=128), replicas()
    expected = alone.generate(prompts(5), params, use_tqdm=False)
    found = both.generate(prompts(5), params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[token].logprob - theirs[token].logprob) < 1e-4 for token in mine)
    states = zip(both.encode(prompts(5), use_tqdm=False), alone.encode(prompts(5), use_tqdm=False), strict=True)
    assert all(torch.allclose(mine.hidden_states, theirs.hidden_states, atol=1e-5) for mine, theirs in states)


def test_the_pooler_of_an_idle_replica_forgets_what_was_given_up(replicas: Callable[..., LLM]) -> None:
    """Its next batch says so, whenever that comes; batches of the other one in between must not use the word up."""
    llm = replicas(max_num_batched_tokens=16)
    engine, executor = llm.engine, cast(TwoReplicas, llm.engine.executor)
    long = [prompt * 6 for prompt in ([3, 4, 5, 6, 7, 8, 9, 10], [13, 14, 15, 16, 17, 18, 19, 20])]
    for name, ids in zip(("first", "second"), long, strict=True):
        engine.add_pooling_request(name, Prompt(ids), PoolingParams())
    engine.step()
    pooler = executor.other.rank.pooler
    assert pooler is not None
    assert list(pooler._partial) == ["second"]
    engine.abort("second")
    while engine.requests:
        engine.step()
    engine.add_pooling_request("third", Prompt([5] * 40), PoolingParams())
    engine.add_pooling_request("fourth", Prompt([6] * 20), PoolingParams())
    while engine.requests:
        engine.step()
    assert not pooler._partial


@pytest.mark.parametrize("place", [0, 1])
def test_values_that_are_no_numbers_cost_nobody_elses_output(replicas: Callable[..., LLM], place: int) -> None:
    """Whichever replica gave them: hidden states that were finished in the same round come with the next one."""
    llm = replicas()
    llm.apply_model(poisoned)
    engine = llm.engine
    if place:
        engine.add_request("good", Prompt([3, 4, 5]), _GREEDY)
    engine.add_request("bad", Prompt([5, _BAD, 6]), _GREEDY)
    engine.add_pooling_request("states", Prompt([8, 9, 10, 11]), PoolingParams())
    with pytest.raises(EngineError, match="'bad'"):
        engine.step()
    engine.abort("bad")
    outputs: dict[str, Any] = {}
    while engine.requests:
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs.keys() == ({"good", "states"} if place else {"states"})


def test_pooled_values_that_are_no_numbers_end_a_step_and_not_the_engine(replicas: Callable[..., LLM]) -> None:
    llm = replicas()
    expected = [output.hidden_states for output in llm.encode(prompts(3), use_tqdm=False)]
    llm.apply_model(poisoned)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"request '\d+': the model gave values that are no numbers") as caught:
            llm.encode([*prompts(3), [4, _BAD, 9]], use_tqdm=False)
        assert len(caught.value.request_ids) == 1
        found = [output.hidden_states for output in llm.encode(prompts(3), use_tqdm=False)]
        assert all(torch.allclose(mine, theirs, atol=1e-5) for mine, theirs in zip(found, expected, strict=True))
    assert all(lane.kv.pool.num_free == lane.kv.pool.num_usable for lane in llm.engine.lanes)


def test_an_engine_that_cannot_be_set_up_ends_its_processes(
    open_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TwoReplicas] = []

    def open_executor(resolution: Any) -> TwoReplicas:
        made.append(TwoReplicas(resolution))
        return made[-1]

    def refuse(*args: Any) -> None:
        raise ValueError("no sampler")

    monkeypatch.setattr(engine_module, "open_executor", open_executor)
    monkeypatch.setattr(engine_module, "Sampler", refuse)
    with pytest.raises(ValueError, match="no sampler"):
        open_llm("llama")
    assert [executor.closed for executor in made] == [True]
