"""What the sampler must know of one sequence: its parameters, the tokens so far, and its own random numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from modelbay_runtime.engine.bad_words import BadWordWatch
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_runtime.structured.constraint import Constraint

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each occurs in the output.

    Kept from step to step: a step costs what is new, and penalties cost the tokens that occurred, not the vocabulary.
    """

    def __init__(self, prompt_token_ids: Iterable[int], vocab_size: int) -> None:
        distinct = dict.fromkeys(token_id for token_id in prompt_token_ids if 0 <= token_id < vocab_size)
        self._place = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = array("q", distinct)
        self._counts = array("f", [0.0]) * len(distinct)
        self._read = 0

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens of the output that were not there last time."""
        for position in range(self._read, len(output_token_ids)):
            token_id = output_token_ids[position]
            place = self._place.setdefault(token_id, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token_id)
                self._counts.append(0.0)
            self._counts[place] += 1.0
        self._read = len(output_token_ids)

    def arrays(self) -> tuple[Ints, Floats]:
        """Token ids and output counts, [U] each: views, to be let go before the next `update`."""
        return np.frombuffer(self._ids, dtype=np.int64), np.frombuffer(self._counts, dtype=np.float32)


@dataclass(slots=True, eq=False)
class SamplingState:
    """One sequence, as the sampler sees it. Made by `Sampler.state`; picklable, unless it has a `constraint`.

    ``output_token_ids`` is the sequence's own growing list: appending to it is all that the engine has to do.
    """

    params: SamplingParams
    output_token_ids: Sequence[int]
    request_id: str
    random: np.random.Generator | None = None
    counts: TokenCounts | None = None
    end_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    bad_words: BadWordWatch | None = None
    bias_ids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    bias: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    constraint: Constraint | None = None

    @property
    def raw_greedy(self) -> bool:
        """Whether the next token is simply the one with the largest logit."""
        return (
            self.params.greedy
            and self.constraint is None
            and self.counts is None
            and self.bad_words is None
            and not len(self.bias_ids)
            and len(self.output_token_ids) >= self.params.min_tokens
        )

    @property
    def restricted(self) -> bool:
        """Whether top-k or top-p applies."""
        return self.params.top_k > 0 or self.params.top_p < 1

    @property
    def finished(self) -> bool:
        """Whether what the output must look like is complete, and nothing could follow."""
        long_enough = len(self.output_token_ids) >= self.params.min_tokens
        return self.constraint is not None and long_enough and self.constraint.finished

    def uniform(self) -> float:
        """This sequence's next random number in [0, 1)."""
        assert self.random is not None, "a greedy sequence draws nothing"
        return float(self.random.random())

    def forbidden(self) -> Ints:
        """Tokens that must not come next; some perhaps twice."""
        held_off = self.end_ids if len(self.output_token_ids) < self.params.min_tokens else self.end_ids[:0]
        return held_off if self.bad_words is None else np.concatenate([held_off, self.bad_words.forbidden()])
