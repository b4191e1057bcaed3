"""From logits to the next token of every sequence in the batch.

The order is fixed: logit bias, forbidden tokens (min_tokens, bad words), penalties, structured outputs, temperature,
min-p, top-k, top-p, draw. Greedy sequences stop after the structured outputs and take the largest.

A sequence's tokens depend on its logits, its parameters and its own random numbers, never on what shares its batch:
every sequence has its own generator, seeded by the request's seed or else by the engine's and the request's ordinal.

Shapes: B sequences, R those of them that need more than an argmax, V the width of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from modelbay.errors import EngineError
from modelbay_runtime.engine import logit_ops
from modelbay_runtime.engine.bad_words import BadWords, BadWordWatch
from modelbay_runtime.engine.logprobs import logprobs_of
from modelbay_runtime.engine.outputs import TokenLogprobs
from modelbay_runtime.engine.sampling_state import SamplingState, TokenCounts
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_runtime.structured.constraint import Constraint
from modelbay_runtime.structured.mask import CONFLICT, Ending, constrain


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row, in the order of the logits, and the log-probabilities of the rows that asked for them.

    ``endings``: rows whose sequence ends here instead; their token means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    endings: Mapping[int, Ending] = field(default_factory=dict)


class Sampler:
    """Chooses tokens.

    Args:
        vocab_size: the model's true vocabulary; columns of the logits past it are padding and never chosen.
        device: where the logits are.
        seed: the engine's, for requests that bring none.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.seed = seed

    def state(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        *,
        request_id: str,
        ordinal: int = 0,
        index: int = 0,
        eos_token_ids: Collection[int] = (),
        bad_words: BadWords | None = None,
        constraint: Constraint | None = None,
    ) -> SamplingState:
        """What `sample` needs of one sequence, for its whole life.

        Args:
            params: with the model's defaults already filled in.
            prompt_token_ids: for the repetition penalty.
            output_token_ids: the sequence's own list, which the engine appends to.
            request_id: named in errors.
            ordinal: the how-manieth request of this engine it is; seeds the sequence if the request has no seed.
            index: which of the request's n sequences.
            eos_token_ids: the model's, which min_tokens holds off.
            bad_words: from `BadWordLists.automaton`.
            constraint: from `Grammars.constraint`, on the same ``output_token_ids``.

        Raises:
            UsageError: a token id beyond the vocabulary.
        """
        params.check_vocabulary(self.vocab_size)
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        end_ids = sorted(i for i in params.end_token_ids(eos_token_ids) if 0 <= i < self.vocab_size)
        return SamplingState(
            params=params,
            output_token_ids=output_token_ids,
            request_id=request_id,
            random=None if params.greedy else self._generator(params.seed, ordinal, index),
            counts=TokenCounts(prompt_token_ids, self.vocab_size) if penalised else None,
            end_ids=np.array(end_ids, dtype=np.int64),
            bad_words=None if bad_words is None else BadWordWatch(bad_words, output_token_ids),
            bias_ids=np.array(list(params.logit_bias), dtype=np.int64),
            bias=np.array(list(params.logit_bias.values()), dtype=np.float32),
            constraint=constraint,
        )

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """The next token of each sequence.

        Args:
            logits: [B, V], the model's dtype, V >= vocab_size. Not changed.
            states: B of them.

        Raises:
            EngineError: a row's logits are NaN, hold +inf or are all -inf, or its parameters forbid every token. Where
                that is because of a constraint, it ends the one sequence instead.
        """
        logits = logits[:, : self.vocab_size]
        largest, greedy = logit_ops.largest(logits)
        _require_finite(largest, states, "the model's logits", _BAD_LOGITS_HINT)
        token_ids: list[int] = greedy.tolist()
        rows = [row for row, state in enumerate(states) if not state.raw_greedy]
        endings: dict[int, Ending] = {}
        if rows:
            chosen, ended = self._process(logits, rows, [states[row] for row in rows])
            for row, token_id in zip(rows, chosen, strict=True):
                token_ids[row] = token_id
            endings = {rows[place]: ending for place, ending in ended.items()}
        return SamplerOutput(token_ids, self._logprobs(logits, token_ids, states), endings)

    def _process(
        self, logits: torch.Tensor, rows: list[int], states: list[SamplingState]
    ) -> tuple[list[int], dict[int, Ending]]:
        scores = logits.new_full((len(rows), logit_ops.padded_width(self.vocab_size)), -math.inf, dtype=torch.float32)
        scores[:, : self.vocab_size] = logits if len(rows) == len(logits) else logits[rows]
        self._edit(scores, states)
        self._penalise(scores, states)
        endings = constrain(scores, states)
        largest, greedy = logit_ops.largest(scores)
        _find_conflicts(largest, states, endings)
        token_ids: list[int] = greedy.tolist()
        for pick, draw in ((False, self._draw_all), (True, self._draw_restricted)):
            places = [
                place
                for place, state in enumerate(states)
                if not state.params.greedy and state.restricted is pick and place not in endings
            ]
            if places:
                # A copy unless all rows are meant, when nobody needs the original any more.
                part = scores if len(places) == len(states) else scores[places]
                drawn = draw(part, [states[place] for place in places])
                for place, token_id in zip(places, drawn.tolist(), strict=True):
                    token_ids[place] = token_id
        return token_ids, endings

    def _edit(self, scores: torch.Tensor, states: list[SamplingState]) -> None:
        biased = [(row, state.bias_ids) for row, state in enumerate(states) if len(state.bias_ids)]
        if biased:
            scores[self._pairs(biased)] += self._to_device(np.concatenate([states[row].bias for row, _ in biased]))
        bans = ((row, state.forbidden()) for row, state in enumerate(states))
        forbidden = [(row, ids) for row, ids in bans if len(ids)]
        if forbidden:
            scores[self._pairs(forbidden)] = -math.inf

    def _penalise(self, scores: torch.Tensor, states: list[SamplingState]) -> None:
        ids, counts, rows = [], [], []
        for row, state in enumerate(states):
            if state.counts is not None:
                state.counts.update(state.output_token_ids)
                row_ids, row_counts = state.counts.arrays()
                rows.append((row, row_ids))
                ids.append(row_ids)
                counts.append(row_counts)
        if not rows:
            return
        lengths = [len(row_ids) for row_ids in ids]

        def each(value: Callable[[SamplingParams], float]) -> torch.Tensor:
            values = np.array([value(states[row].params) for row, _ in rows], dtype=np.float32)
            return self._to_device(values.repeat(lengths))

        row_index, id_index = self._pairs(rows)
        logit_ops.apply_penalties(
            scores,
            row_index,
            id_index,
            self._to_device(np.concatenate(counts)),
            repetition=each(lambda params: params.repetition_penalty),
            presence=each(lambda params: params.presence_penalty),
            frequency=each(lambda params: params.frequency_penalty),
        )

    def _draw_all(self, scores: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
        self._warm(scores, states)
        weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
        return logit_ops.draw(weights, self._uniform(states))

    def _draw_restricted(self, scores: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
        self._warm(scores, states)
        top_k = torch.tensor([min(max(state.params.top_k, 0), self.vocab_size) for state in states])
        top_p = self._column(states, lambda params: params.top_p)
        return logit_ops.draw_restricted(scores[:, : self.vocab_size], top_k, top_p, self._uniform(states))

    def _warm(self, scores: torch.Tensor, states: list[SamplingState]) -> None:
        if any(state.params.temperature != 1 for state in states):
            scores.div_(self._column(states, lambda params: params.temperature)[:, None])
        if any(state.params.min_p > 0 for state in states):
            logit_ops.mask_below_min_p(scores, self._column(states, lambda params: params.min_p))

    def _logprobs(
        self, logits: torch.Tensor, token_ids: list[int], states: Sequence[SamplingState]
    ) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(states)
        groups: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            if state.params.logprobs is not None:
                groups.setdefault(state.params.logprobs, []).append(row)
        # One call for each k: which of two tied tokens is the k-th must not depend on what a neighbour asked for.
        for k, rows in groups.items():
            targets = torch.tensor([token_ids[row] for row in rows], device=logits.device)
            for row, entry in zip(rows, logprobs_of(logits[rows], targets, k), strict=True):
                result[row] = entry
        return result

    def _generator(self, seed: int | None, ordinal: int, index: int) -> np.random.Generator:
        # The first number keeps a request's own seeds apart from those derived from the engine's.
        entropy = [0, seed % 2**64, index] if seed is not None else [1, self.seed % 2**64, ordinal, index]
        return np.random.default_rng(entropy)

    def _pairs(self, rows: list[tuple[int, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and token indices, [E] each, of every (row, its token ids)."""
        row_index = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
        return self._to_device(row_index), self._to_device(np.concatenate([ids for _, ids in rows]))

    def _uniform(self, states: list[SamplingState]) -> torch.Tensor:
        return self._to_device(np.array([state.uniform() for state in states]))

    def _column(self, states: list[SamplingState], value: Callable[[SamplingParams], float]) -> torch.Tensor:
        return torch.tensor([value(state.params) for state in states], dtype=torch.float32, device=self.device)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


_BAD_LOGITS_HINT = (
    "The weights may be damaged, or overflow in this dtype: try dtype=float32, and `modelbay check` on the model."
)


def _find_conflicts(largest: torch.Tensor, states: Sequence[SamplingState], endings: dict[int, Ending]) -> None:
    """Add the constrained rows to which nothing is left; ``largest`` [R] is the largest score of each row."""
    if bool(torch.isfinite(largest).all()):
        return
    for place, value in enumerate(largest.tolist()):
        if value == -math.inf and states[place].constraint is not None:
            endings.setdefault(place, CONFLICT)
    rest = [place for place in range(len(states)) if place not in endings]
    what = "after logit_bias, bad_words, min_tokens and penalties the logits"
    _require_finite(largest[rest], [states[place] for place in rest], what, None)


def _require_finite(largest: torch.Tensor, states: Sequence[SamplingState], what: str, hint: str | None) -> None:
    """The largest logit of a row [B] says it all: NaN if any is, +inf if any is, -inf if all are."""
    if bool(torch.isfinite(largest).all()):
        return
    bad = {
        state.request_id: "all -inf" if value == -math.inf else value
        for state, value in zip(states, largest.tolist(), strict=True)
        if not math.isfinite(value)
    }
    names = ", ".join(f"{name!r} ({value})" for name, value in bad.items())
    raise EngineError(
        f"{what} are not usable for request {names}; no token was chosen.", hint=hint, request_ids=list(bad)
    )
