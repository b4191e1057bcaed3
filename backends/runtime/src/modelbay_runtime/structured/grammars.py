"""The grammars of one engine: compiled once for each specification, shared by the sequences that follow them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from modelbay_runtime.structured.compiler import compile_grammar, import_library
from modelbay_runtime.structured.constraint import Constraint
from modelbay_runtime.structured.spec import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars that are kept; the one that was used longest ago goes first.
CAPACITY = 64
_END = b"<end>"


class Grammars:
    """Compiled grammars over one vocabulary.

    Args:
        token_bytes: gives what each token id below ``vocab_size`` adds to the text; empty for special tokens and for
            ids that the tokenizer does not know, which no grammar allows. Called when the first grammar is needed.
        vocab_size: the model's.
    """

    def __init__(self, token_bytes: Callable[[], Sequence[bytes]], vocab_size: int) -> None:
        self._token_bytes = token_bytes
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, spec: StructuredOutputs | None, output_token_ids: Sequence[int]) -> Constraint | None:
        """What holds one sequence to ``spec``; None if nothing does.

        Args:
            output_token_ids: the sequence's own list, which the engine appends to.

        Raises:
            UsageError: a specification that cannot be used, or no llguidance.
        """
        if spec is None:
            return None
        return Constraint(self._matcher(spec).deep_copy(), output_token_ids, self._vocab_size)

    def _matcher(self, spec: StructuredOutputs) -> LLMatcher:
        """Several threads may ask: compiling takes long, and a server does it beside the engine's own."""
        with self._lock:
            matcher = self._compiled.get(spec.key)
        if matcher is None:
            matcher = compile_grammar(*spec.key, self._vocabulary())
        with self._lock:
            self._compiled[spec.key] = matcher
            self._compiled.move_to_end(spec.key)
            if len(self._compiled) > CAPACITY:
                self._compiled.popitem(last=False)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            library = import_library()
            wrapper = library.TokenizerWrapper(_Vocabulary(self._token_bytes()))
            self._tokenizer = library.LLTokenizer(wrapper)
        return self._tokenizer


class _Vocabulary:
    """The bytes of every token, as llguidance asks for them.

    The end of the output is a token of its own past the vocabulary: a model may have several that end it, or none.
    """

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.tokens = [*token_bytes, _END]
        self.eos_token_id = len(token_bytes)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        """Encoding is asked for only where text is forced, which is off."""
        return []
