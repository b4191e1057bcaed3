"""Tokens that a step computed on a guess, and what the sampler makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelbay_runtime.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens guessed to follow a sequence's, [n], and the logits behind each, [n, V].

    A token is drawn as without guesses; where it is the one guessed, the logits behind that are what they would be in
    the next step, and the next token is drawn from them. So the output is the same, seeds, penalties and structured
    outputs included, whatever is guessed.
    """

    sequence: Sequence
    tokens: list[int]
    logits: torch.Tensor

    @property
    def right(self) -> bool:
        """Whether the sequence goes on, and with the token that was guessed."""
        return self.sequence.status is Status.RUNNING and self.sequence.token_ids[-1] == self.tokens[0]

    def rest(self) -> Guess:
        return Guess(self.sequence, self.tokens[1:], self.logits[1:])
