"""One sequence's place in its grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modelbay_runtime.structured.compiler import reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.uint8]


class Constraint:
    """Made by `Grammars.constraint`.

    It reads the sequence's own growing list of output tokens, as the rest of the sampling state does, so nothing has to
    be told of a preemption: tokens that were read stay read.

    Attributes:
        may_end: after `allowed`: whether the output so far is complete.
        error: why the grammar cannot go on from here, if it cannot; it stays.
    """

    def __init__(self, matcher: LLMatcher, output_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._output = output_token_ids
        self._vocab_size = vocab_size
        self._read = 0
        # One bit for each token, and one past them, which stands for the end (see `Grammars`).
        self._bits = np.zeros(-(-(vocab_size + 1) // 32) * 4, dtype=np.uint8)
        self.may_end = False
        self.error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the output is complete and nothing could follow."""
        self._follow()
        return self.error is None and self._matcher.is_stopped()

    def allowed(self) -> Bits:
        """The text tokens that may come next: bit ``i % 8`` of byte ``i // 8`` for token ``i``, read-only.

        Tokens that end the output are no text; `may_end` says whether they may come. None may where `error` is set.
        """
        self._follow()
        self._bits[:] = 0
        self.may_end = False
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            if self._matcher.is_error():
                self._fail()
                self._bits[:] = 0
        byte, bit = divmod(self._vocab_size, 8)
        self.may_end = bool(self._bits[byte] >> bit & 1)
        self._bits[byte] &= ~np.uint8(1 << bit)
        return self._bits

    def _follow(self) -> None:
        """Read the tokens that came since last time."""
        while self._read < len(self._output) and self.error is None:
            accepted = self._matcher.consume_token(self._output[self._read])
            self._read += 1
            if not accepted:
                self._fail()

    def _fail(self) -> None:
        self.error = reason_of(self._matcher)
