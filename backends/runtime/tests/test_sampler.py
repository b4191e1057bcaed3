"""The sampler against Transformers' own logits processors, and what must hold whatever shares the batch."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modelbay.errors import EngineError, UsageError
from modelbay_runtime.engine import logit_ops
from modelbay_runtime.engine.bad_words import BadWords
from modelbay_runtime.engine.logprobs import logprobs_of
from modelbay_runtime.engine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from modelbay_runtime.engine.sampler import Sampler
from modelbay_runtime.engine.sampling_state import SamplingState, TokenCounts
from modelbay_runtime.sampling_params import SamplingParams

GRID = 4000


class _Given:
    """Random numbers that are not: the same one every time."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def make_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def state_of(sampler: Sampler, params: SamplingParams, *, output: Sequence[int] = (), **kwargs: Any) -> SamplingState:
    kwargs = {"request_id": "r", "prompt_token_ids": [], **kwargs}
    return sampler.state(params, output_token_ids=list(output), **kwargs)


def distribution(row: torch.Tensor, params: SamplingParams, **kwargs: Any) -> np.ndarray:
    """[V]: the probabilities the sampler gives to each token, by drawing at GRID equidistant random numbers."""
    sampler = Sampler(len(row))
    states = []
    for step in range(GRID):
        state = state_of(sampler, params, **kwargs)
        state.random = _Given((step + 0.5) / GRID)  # type: ignore[assignment]
        states.append(state)
    tokens = sampler.sample(row.expand(GRID, -1), states).token_ids
    return np.bincount(tokens, minlength=len(row)) / GRID


def reference(row: torch.Tensor, params: SamplingParams, ids: Sequence[int] = ()) -> np.ndarray:
    """[V]: what Transformers' processors, in float32 and in our order, make of the same logits."""
    scores, input_ids = row[None].float(), torch.tensor([list(ids)], dtype=torch.int64)
    processors: list[Any] = []
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores.softmax(-1)[0].numpy()


CASES = [
    {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 2.5}, {"min_p": 0.1}, {"min_p": 1.0},
    {"top_k": 1}, {"top_k": 5}, {"top_k": -1}, {"top_k": 10_000}, {"top_p": 0.9}, {"top_p": 0.01},
    {"top_p": 0.5, "top_k": 7},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.02}, {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 1.5, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("vocab", [50, 700])
@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case))
def test_distribution_equals_transformers(case: dict[str, Any], vocab: int) -> None:
    row = make_logits(1, vocab, seed=vocab)[0]
    params = SamplingParams(**case)
    prompt, output = [1, 2, 3, 3], [4, 2, 9]
    found = distribution(row, params, prompt_token_ids=prompt, output=output)
    wanted = reference(row, params, prompt + output)
    # Both ends of a token's stretch may fall between two points of the grid.
    assert np.abs(found - wanted).max() <= 1.01 / GRID
    assert not found[wanted == 0].any(), "a token that Transformers forbids was drawn"


def test_top_k_keeps_the_tokens_that_tie_with_the_last_as_transformers_does() -> None:
    row = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, 0.0, -math.inf])
    params = SamplingParams(top_k=2)
    assert np.abs(distribution(row, params) - reference(row, params)).max() <= 1.01 / GRID


def test_more_ties_than_candidates_are_all_kept() -> None:
    row = torch.zeros(900)
    assert np.abs(distribution(row, SamplingParams(top_k=3)) - 1 / 900).max() <= 1.01 / GRID


def test_top_k_beyond_what_is_possible_draws_only_possible_tokens() -> None:
    row = torch.full((2000,), -math.inf)
    row[[3, 1999]] = torch.tensor([1.0, 2.0])
    found = distribution(row, SamplingParams(top_k=50, top_p=0.999))
    assert set(found.nonzero()[0]) == {3, 1999}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), vocab=st.integers(2, 3000), coarse=st.booleans(), top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.3]),
    scale=st.sampled_from([0.01, 1.0, 6.0]), u=st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_restricted_draw_equals_a_sort_of_everything(
    seed: int, vocab: int, coarse: bool, top_k: int, top_p: float, scale: float, u: float
) -> None:
    """Candidates are only a short cut: the token is the one that sorting the whole vocabulary gives, ties included."""
    logits = make_logits(3, vocab, seed=seed, scale=scale)
    if coarse:
        logits = logits.bfloat16().float()
    got = logit_ops.draw_restricted(
        logits, torch.tensor([top_k] * 3), torch.tensor([top_p] * 3), torch.full((3,), u, dtype=torch.float64)
    )
    for row, token in zip(logits.double().numpy(), got.tolist(), strict=True):
        order = np.lexsort((np.arange(vocab), -row))
        kept = order if top_k in (0,) or top_k >= vocab else order[row[order] >= row[order[top_k - 1]]]
        p = np.exp(row[kept] - row.max())
        p /= p.sum()
        edge = np.cumsum(p) - p
        kept, p = kept[edge < np.float32(top_p)], p[edge < np.float32(top_p)]
        position = int(np.where(kept == token)[0][0]) if token in kept else None
        # At an edge of the nucleus or between two tokens, float32 sums may fall on the other side.
        if position is None:
            assert np.abs(edge - top_p).min() < 1e-5
        else:
            below = p[:position].sum() / p.sum()
            assert below - 1e-5 <= u <= below + p[position] / p.sum() + 1e-5


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 1500), u=st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulative_distribution(seed: int, width: int, u: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((2, width)) * (rng.random((2, width)) < 0.3)
    weights[:, rng.integers(width)] += 1e-3
    got = logit_ops.draw(torch.from_numpy(weights), torch.full((2,), u, dtype=torch.float64)).tolist()
    for row, index in zip(weights, got, strict=True):
        assert row[index] > 0
        share = np.cumsum(row) / row.sum()
        assert share[index] - row[index] / row.sum() - 1e-9 <= u <= share[index] + 1e-9


@pytest.mark.parametrize("u", [0.0, math.nextafter(1.0, 0.0)])
def test_draw_never_takes_a_weight_of_zero_at_either_end(u: float) -> None:
    weights = torch.zeros(1, 1000)
    weights[0, 300:600] = 0.1
    assert 300 <= int(logit_ops.draw(weights, torch.tensor([u], dtype=torch.float64))) < 600


@pytest.mark.parametrize("case", [{}, {"top_k": 6, "top_p": 0.95, "temperature": 0.8}])
def test_frequencies_of_real_draws_fit_the_distribution(case: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws of one sequence; 27.9 is the 0.9998 quantile for 7 degrees of freedom."""
    row, draws = make_logits(1, 8, scale=1.0), 20_000
    params = SamplingParams(seed=11, **case)
    sampler = Sampler(8)
    state = state_of(sampler, params)
    tokens = sampler.sample(row.expand(draws, -1), [state] * draws).token_ids
    wanted = reference(row[0], params) * draws
    counts = np.bincount(tokens, minlength=8)
    possible = wanted > 0
    assert not counts[~possible].any()
    assert ((counts - wanted)[possible] ** 2 / wanted[possible]).sum() < 27.9


def test_greedy_is_the_argmax_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = make_logits(5, 600).to(dtype)
        sampler = Sampler(600)
        states = [state_of(sampler, SamplingParams(temperature=0)) for _ in range(5)]
        assert sampler.sample(logits, states).token_ids == logits.float().argmax(-1).tolist()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 4), width=st.integers(1, 900), padding=st.integers(0, 3))
def test_largest_is_the_first_maximum_of_each_row(seed: int, rows: int, width: int, padding: int) -> None:
    """Few distinct values, so that most maxima tie; padded, so that rows are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (rows, width + padding), generator=generator).bfloat16()[:, :width]
    values, ids = logit_ops.largest(logits)
    for row, value, index in zip(logits.tolist(), values.tolist(), ids.tolist(), strict=True):
        assert (value, index) == (max(row), row.index(max(row)))


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(1, 600, dtype=torch.bfloat16)
    logits[0, [70, 333]] = 2.0
    sampler = Sampler(600)
    assert sampler.sample(logits, [state_of(sampler, SamplingParams(temperature=0))]).token_ids == [70]


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    logits = make_logits(4, 300)
    logits[:, 256:] = 100.0
    sampler = Sampler(256)
    for params in (
        {"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0, "presence_penalty": 1},
        {"logprobs": 5},
    ):  # fmt: skip
        out = sampler.sample(logits, [state_of(sampler, SamplingParams(**params)) for _ in range(4)])
        assert max(out.token_ids) < 256
        assert all(max(entry.top_ids) < 256 for entry in out.logprobs if entry)


def test_logits_are_left_as_they_were() -> None:
    logits = make_logits(2, 256)
    before = logits.clone()
    sampler = Sampler(256)
    sampler.sample(logits, [state_of(sampler, SamplingParams(temperature=0.3, min_p=0.5, logit_bias={1: 5.0}))] * 2)
    assert torch.equal(logits, before)


def processed(row: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The logits after penalties, read back through greedy logprob-free internals: a one-row `_penalise`."""
    sampler = Sampler(len(row))
    scores = row[None].clone()
    sampler._penalise(scores, [state_of(sampler, params, prompt_token_ids=prompt, output=output)])
    return scores[0]


def test_penalties_follow_their_definitions() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5])
    prompt, output = [0, 1], [1, 2, 2]
    got = processed(
        row, SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), prompt, output
    )
    wanted = [2.0 / 2, -2.0 * 2 - 0.5 - 0.25, 1.0 / 2 - 0.5 - 0.5, -1.0, 0.5]
    assert got.tolist() == pytest.approx(wanted)


def test_repetition_penalty_equals_transformers_on_the_logits() -> None:
    row, prompt, output = make_logits(1, 400)[0], [5, 7, 7, 300], [9, 5, 11]
    got = processed(row, SamplingParams(repetition_penalty=1.2), prompt, output)
    wanted = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([prompt + output]), row[None])
    assert torch.equal(got, wanted[0])


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(-2, 40), max_size=30),
    output=st.lists(st.integers(0, 31), max_size=30),
    cut=st.integers(0, 30),
)
def test_counts_grow_with_the_output(prompt: list[int], output: list[int], cut: int) -> None:
    counts = TokenCounts(prompt, vocab_size=32)
    for known in (output[:cut], output):
        counts.update(known)
        ids, times = counts.arrays()
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
            **{token: 0.0 for token in prompt if 0 <= token < 32},
            **{token: float(known.count(token)) for token in known},
        }
        del ids, times


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = make_logits(3, 256)
    sampler = Sampler(256)
    best = logits.argmax(-1).tolist()
    states = [
        state_of(sampler, SamplingParams(temperature=0)),
        state_of(sampler, SamplingParams(temperature=0, frequency_penalty=2.0), output=[best[1]] * 20),
        state_of(sampler, SamplingParams(temperature=0, repetition_penalty=1.0001), prompt_token_ids=[1]),
    ]
    got = sampler.sample(logits, states).token_ids
    assert got[0] == best[0]
    assert got[1] == logits[1].topk(2).indices[1].item()
    assert got[2] == best[2]


def test_logit_bias_forbids_and_forces() -> None:
    logits = make_logits(1, 256)
    best = int(logits.argmax())
    sampler = Sampler(256)
    assert sampler.sample(
        logits, [state_of(sampler, SamplingParams(temperature=0, logit_bias={17: 100}))]
    ).token_ids == [17]
    assert sampler.sample(logits, [state_of(sampler, SamplingParams(logit_bias={best: -100}, top_k=1))]).token_ids != [
        best
    ]
    with pytest.raises(UsageError, match="token id 256 is beyond"):
        state_of(sampler, SamplingParams(logit_bias={256: 1}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_off_every_token_that_would_end_it(temperature: float) -> None:
    logits = torch.zeros(1, 16)
    logits[0, [3, 5]] = 50.0
    sampler = Sampler(16)
    output: list[int] = []
    params = SamplingParams(temperature=temperature, min_tokens=2, max_tokens=8, stop_token_ids=[5], seed=1)
    state = sampler.state(params, [], output, request_id="r", eos_token_ids=[3])
    for step in range(4):
        token = sampler.sample(logits, [state]).token_ids[0]
        assert (token in (3, 5)) is (step >= 2), step
        output.append(token)


def test_min_tokens_with_ignore_eos_lets_the_end_token_through() -> None:
    logits = torch.zeros(1, 16)
    logits[0, 3] = 50.0
    sampler = Sampler(16)
    params = SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)
    assert sampler.sample(logits, [state_of(sampler, params, eos_token_ids=[3])]).token_ids == [3]


def test_bad_words_are_forbidden_only_where_they_would_be_completed() -> None:
    sampler = Sampler(16)
    logits = torch.zeros(1, 16)
    logits[0, 4], logits[0, 2] = 5.0, 3.0
    params = SamplingParams(temperature=0)
    for output, wanted in (([1], 2), ([9], 4), ([], 4), ([1, 9], 4), ([9, 1], 2)):
        state = state_of(sampler, params, output=output, bad_words=BadWords([[1, 4], [7]]))
        assert sampler.sample(logits, [state]).token_ids == [wanted], output


def run_alone(sampler: Sampler, logits: Sequence[torch.Tensor], params: SamplingParams, **kwargs: Any) -> list[int]:
    output: list[int] = []
    state = sampler.state(params, [1, 2, 3], output, request_id="alone", **kwargs)
    for row in logits:
        output += sampler.sample(row[None], [state]).token_ids
    return output


NEIGHBOURS = [
    {"temperature": 0}, {}, {"top_k": 400}, {"top_p": 0.999, "temperature": 3.0}, {"repetition_penalty": 1.5},
    {"min_p": 0.3},
    {"logprobs": 7}, {"seed": 5, "top_k": 3}, {"logit_bias": {4: 9.0}}, {"temperature": 0, "presence_penalty": 1.0},
]  # fmt: skip
REQUESTS = [
    {"seed": 7}, {"seed": 7, "top_k": 20}, {"seed": 7, "top_p": 0.9},
    {"top_p": 0.95, "top_k": 10, "repetition_penalty": 1.2},
    {"temperature": 1.7, "min_p": 0.01}, {"temperature": 0, "frequency_penalty": 0.3}, {"temperature": 0},
]  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: json.dumps(case))
def test_a_request_does_not_depend_on_what_shares_its_batch(case: dict[str, Any]) -> None:
    """bfloat16 logits have many ties: which of two equals is taken must not depend on the neighbours either."""
    vocab, steps = 5000, 12
    logits = [make_logits(1, vocab, seed=step, scale=2.0)[0].bfloat16() for step in range(steps)]
    params = SamplingParams(**case)
    wanted = run_alone(Sampler(vocab, seed=3), logits, params, ordinal=4)

    sampler, output = Sampler(vocab, seed=3), []
    state = sampler.state(params, [1, 2, 3], output, request_id="mine", ordinal=4)
    others = [
        state_of(sampler, SamplingParams(**other), request_id=f"other-{ordinal}", ordinal=10 + ordinal)
        for ordinal, other in enumerate(NEIGHBOURS)
    ]
    for step, row in enumerate(logits):
        batch = [*others[: step + 1], state, *others[step + 1 :]]
        rows = torch.stack(
            [row if member is state else make_logits(1, vocab, seed=99 + step)[0].bfloat16() for member in batch]
        )
        output.append(sampler.sample(rows, batch).token_ids[batch.index(state)])
    assert output == wanted


def test_seeds_decide_the_draws_and_nothing_else_does() -> None:
    logits = [make_logits(1, 64, seed=step, scale=1.0)[0] for step in range(16)]
    seeded = SamplingParams(seed=42)
    same = [run_alone(Sampler(64, seed=engine), logits, seeded, ordinal=n) for engine, n in ((0, 0), (1, 0), (0, 9))]
    assert same[0] == same[1] == same[2]
    free = SamplingParams()
    runs = [
        run_alone(Sampler(64, seed=engine), logits, free, ordinal=n) for engine, n in ((0, 0), (1, 0), (0, 9), (0, 42))
    ]
    runs += [run_alone(Sampler(64), logits, seeded, index=index) for index in range(3)]
    runs += [run_alone(Sampler(64), logits, free, index=index) for index in (1, 2)]
    assert all(a != b for a, b in itertools.combinations(runs, 2)), "two different sequences drew the same"
    assert runs[0] == run_alone(Sampler(64, seed=0), logits, free, ordinal=0)
    assert run_alone(Sampler(64), logits, SamplingParams(seed=-3)) == run_alone(
        Sampler(64), logits, SamplingParams(seed=-3)
    )


def test_a_state_can_be_moved_to_another_process() -> None:
    sampler = Sampler(64)
    state = state_of(sampler, SamplingParams(seed=1, frequency_penalty=0.5), output=[3])
    logits = make_logits(1, 64)
    sampler.sample(logits, [state])
    copy = pickle.loads(pickle.dumps(state))
    assert [sampler.sample(logits, [state]).token_ids for _ in range(5)] == [
        sampler.sample(logits, [copy]).token_ids for _ in range(5)
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("case", [{"temperature": 0}, {}, {"top_k": 3}, {"logit_bias": {0: -100.0}}], ids=str)
def test_unusable_logits_are_an_error_that_names_the_request(bad: float, case: dict[str, Any]) -> None:
    logits = make_logits(3, 300)
    logits[1, 299] = bad
    sampler = Sampler(300)
    states = [state_of(sampler, SamplingParams(**case), request_id=f"req-{row}") for row in range(3)]
    with pytest.raises(EngineError, match=f"'req-1' \\({bad}\\)") as caught:
        sampler.sample(logits, states)
    assert "req-0" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_of_minus_infinity_is_an_error() -> None:
    logits = torch.full((1, 32), -math.inf)
    sampler = Sampler(32)
    with pytest.raises(EngineError, match="all -inf"):
        sampler.sample(logits, [state_of(sampler, SamplingParams(temperature=0))])


def test_parameters_that_forbid_every_token_are_an_error() -> None:
    sampler = Sampler(2)
    state = state_of(sampler, SamplingParams(temperature=0), bad_words=BadWords([[0], [1]]))
    with pytest.raises(EngineError, match="bad_words"):
        sampler.sample(torch.zeros(1, 2), [state])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits(3, 300).bfloat16()
    sampler = Sampler(300)
    case = {"temperature": 0.2, "repetition_penalty": 1.8, "seed": 2}
    states = [
        state_of(sampler, SamplingParams(logprobs=4, **case), prompt_token_ids=[1, 2]),
        state_of(sampler, SamplingParams(**case)),
        state_of(sampler, SamplingParams(logprobs=0, temperature=0)),
    ]
    out = sampler.sample(logits, states)
    wanted = logits.float().log_softmax(-1)
    first, second, third = out.logprobs
    assert second is None
    assert first is not None
    assert third is not None
    assert first.token_id == out.token_ids[0]
    assert first.logprob == pytest.approx(wanted[0, out.token_ids[0]].item(), abs=1e-5)
    assert sorted(first.top_logprobs, reverse=True) == pytest.approx(wanted[0].topk(4).values.tolist(), abs=1e-5)
    assert wanted[0, list(first.top_ids)].tolist() == pytest.approx(list(first.top_logprobs), abs=1e-5)
    assert first.rank == (wanted[0] > wanted[0, out.token_ids[0]]).sum() + 1
    assert (third.rank, list(third.top_ids)) == (1, [])


def test_prompt_logprobs_equal_log_softmax_over_chunks() -> None:
    logits = make_logits(600, 90, seed=5)
    targets = torch.arange(600) % 80
    got = logprobs_of(logits, targets, 3, vocab_size=80)
    wanted = logits[:, :80].log_softmax(-1)
    assert [entry.token_id for entry in got] == targets.tolist()
    assert [entry.logprob for entry in got] == pytest.approx(wanted[torch.arange(600), targets].tolist(), abs=1e-5)
    assert [list(entry.top_ids) for entry in got] == wanted.topk(3).indices.tolist()
    assert [entry.rank for entry in got] == (
        (wanted > wanted[torch.arange(600), targets][:, None]).sum(-1) + 1
    ).tolist()


def test_logprobs_become_entries_with_the_chosen_token_once() -> None:
    chosen_on_top = TokenLogprobs(7, -0.1, 1, [7, 3], [-0.1, -2.0]).to_dict(lambda token_id: f"<{token_id}>")
    assert chosen_on_top == {7: Logprob(-0.1, 1, "<7>"), 3: Logprob(-2.0, 2, "<3>")}
    chosen_below = TokenLogprobs(9, -5.0, 12, [7, 3], [-0.1, -2.0]).to_dict()
    assert list(chosen_below) == [9, 7, 3]
    assert chosen_below[9] == Logprob(-5.0, 12)


def test_outputs_become_json() -> None:
    completion = CompletionOutput(
        0, "hi", (5,), -0.5, [{5: Logprob(-0.5, 1, "hi"), 6: Logprob(-math.inf, 2, "x")}], "stop", "END"
    )
    output = RequestOutput(
        "r1",
        "say",
        [1, 2],
        [completion],
        [None, {2: Logprob(-1.0, 3, "s")}],
        RequestMetrics(10.0, 10.5, 11.0, 12.0),
        True,
    )
    data = json.loads(json.dumps(output.to_dict(), allow_nan=False))
    assert completion.finished()
    assert data["request_id"] == "r1"
    assert data["outputs"][0]["token_ids"] == [5]
    assert data["outputs"][0]["logprobs"][0]["6"] == {"logprob": None, "rank": 2, "token": "x"}
    assert (data["outputs"][0]["finish_reason"], data["outputs"][0]["stop_reason"]) == ("stop", "END")
    assert data["prompt_logprobs"] == [None, {"2": {"logprob": -1.0, "rank": 3, "token": "s"}}]
    assert (data["metrics"]["queued_s"], data["metrics"]["time_to_first_token_s"], data["metrics"]["total_s"]) == (
        0.5,
        1.0,
        2.0,
    )
    assert pickle.loads(pickle.dumps(output)) == output


def test_an_embedding_reads_both_ways() -> None:
    output = EmbeddingOutput("r", "a", [1], [0.5, 0.25])
    assert output.outputs.embedding == output.embedding
    assert json.loads(json.dumps(output.to_dict()))["embedding"] == [0.5, 0.25]
