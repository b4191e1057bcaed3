"""Token ids to text, one token at a time (BEHAVIOUR T5).

The text of a sequence is what ``tokenizer.decode`` makes of its output ids, as the continuation of a text. The two
differ in one thing only: decoders that strip the space before the first word of a text (SentencePiece's, as in
Llama 2) do not strip it here if the prompt has text before it, so that prompt and output can be put together. For
byte-level tokenizers they are the same. ``clean_up_tokenization_spaces`` is off: it would take away characters that
the model wrote.

The pieces of a stream put together are that text, exactly: what a later token could still change (the bytes of an
unfinished character, a possible beginning of a stop string) is held back. A token costs the same however long the
text is.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from modelbay.errors import UsageError
from modelbay_runtime.engine.stop_strings import StopStrings
from modelbay_runtime.sampling_params import SamplingParams

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class TextUpdate(NamedTuple):
    """What one token did: the new text to show, and whether (and why) the sequence is over."""

    delta: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Detokenizer:
    """Makes a `TextStream` for each sequence; keeps what they share of the tokenizer.

    Args:
        tokenizer: as Transformers returns it, fast, slow, or switched to fastokens; None for no text at all.
        eos_token_ids: the model's end-of-sequence tokens (BEHAVIOUR C10's union).
    """

    def __init__(self, tokenizer: Any | None, eos_token_ids: Collection[int] = ()) -> None:
        self._vocabulary = None if tokenizer is None else _Vocabulary(tokenizer)
        self._eos_token_ids = frozenset(eos_token_ids)

    def stream(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        """The stream of one sequence. The prompt only tells whether the output begins a text or continues one."""
        source: _Text | None = None
        if self._vocabulary is not None and params.detokenize:
            source = self._vocabulary.text(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        return TextStream(source, params, self._eos_token_ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands inside a text, special or not; "" if the tokenizer does not know it."""
        return "" if self._vocabulary is None else self._vocabulary.token_text(token_id)

    def own_bytes(self, token_id: int) -> bytes | None:
        """The bytes of one token as it stands inside a text, special or not, be they parts of a character; b"" if the
        tokenizer does not know it, None where it does not tell the bytes."""
        return None if self._vocabulary is None else self._vocabulary.own_bytes(token_id)

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks, in a tokenizer with byte fallback."""
        return self._vocabulary is not None and not self._vocabulary.byte_level and self._vocabulary.is_byte(token_id)

    def token_bytes(self, vocab_size: int) -> list[bytes]:
        """What each token id below ``vocab_size`` adds to a text; b"" for special tokens, for ids that the tokenizer
        does not know, and for those without a text of their own.

        Raises:
            UsageError: there is no tokenizer.
        """
        if self._vocabulary is None:
            raise UsageError("structured_outputs needs a tokenizer, and this model was loaded without one.")
        return [self._vocabulary.text_bytes(token_id) for token_id in range(vocab_size)]


class TextStream:
    """The text of one sequence as it grows, and whether it has ended. Made by `Detokenizer.stream`."""

    def __init__(self, source: _Text | None, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self._source = source
        self._end_ids = params.end_token_ids(eos_token_ids)
        self._reasons = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, include=self._include_stop) if params.stop else None
        self._pieces: list[str] = []
        self._tokens = 0
        self._finished = False

    @property
    def text(self) -> str:
        """All text shown so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def append(self, token_id: int) -> TextUpdate:
        """Add one output token.

        Returns:
            The text to show now, and finish_reason "stop" if the token ends the sequence: an end-of-sequence token
            (stop_reason None), a token of ``stop_token_ids`` (its id), or a stop string (the string). The text of such
            a token, and of the stop string and all after it, is left out unless ``include_stop_str_in_output``.
        """
        assert not self._finished, "no token comes after the end"
        self._tokens += 1
        armed = self._tokens > self._min_tokens
        if armed and token_id in self._end_ids:
            return self._end_by_token(token_id)
        if self._source is None:
            return _NO_TEXT
        delta, stop = self._filter(self._source.push(token_id), armed)
        if stop is not None:
            self._finished = True
        self._show(delta)
        return TextUpdate(delta, None if stop is None else "stop", stop)

    def finish(self) -> TextUpdate:
        """End the sequence from outside (length, abort) and show what was held back.

        The bytes of a character that never got complete become what the full decode makes of them. A stop string that
        is only now complete still counts.
        """
        if self._finished or self._source is None:
            self._finished = True
            return _NO_TEXT
        self._finished = True
        delta, stop = self._filter(self._source.finish(), self._tokens > self._min_tokens)
        if stop is None and self._stops is not None:
            delta += self._stops.flush()
        self._show(delta)
        return TextUpdate(delta, None if stop is None else "stop", stop)

    def _end_by_token(self, token_id: int) -> TextUpdate:
        delta = ""
        if self._source is not None and self._include_stop:
            delta, _ = self._filter(self._source.push(token_id), armed=False)
            self._show(delta)
        delta += self.finish().delta
        return TextUpdate(delta, "stop", token_id if token_id in self._reasons else None)

    def _filter(self, piece: str, armed: bool) -> tuple[str, str | None]:
        return (piece, None) if self._stops is None else self._stops.feed(piece, armed=armed)

    def _show(self, delta: str) -> None:
        if delta:
            self._pieces.append(delta)


_NO_TEXT = TextUpdate("")


class _Text(Protocol):
    """Decodes one sequence token by token; what is not certain yet stays inside."""

    def push(self, token_id: int) -> str:
        """The text that became certain."""

    def finish(self) -> str:
        """The text of what is still inside."""


class _Vocabulary:
    """What is asked of the tokenizer for every token, asked once per token id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[int, str | None] = {}
        self._special: dict[int, bool] = {}
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None

    @property
    def byte_level(self) -> bool:
        return self._alphabet is not None

    def text(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> _Text:
        if self._alphabet is not None:
            return _ByteLevelText(self, skip_special_tokens)
        return _WindowText(self, skip_special_tokens, self._context(prompt_token_ids, skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None where the tokenizer has none (BEHAVIOUR T3)."""
        if token_id not in self._tokens:
            try:
                self._tokens[token_id] = self._tokenizer.convert_ids_to_tokens(token_id)
            except (IndexError, KeyError):
                self._tokens[token_id] = None
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves the token out. Asked of the decoder: lists of special tokens differ
        from what it does, and some tokenizers take long to make one."""
        special = self._special.get(token_id)
        if special is None:
            special = not self.decode([token_id], skip_special_tokens=True) and bool(self.decode([token_id]))
            self._special[token_id] = special
        return special

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token of a byte-level tokenizer stands for."""
        known = self._bytes.get(token_id)
        if known is None:
            assert self._alphabet is not None
            token = self.token(token_id) or ""
            try:
                known = bytes([self._alphabet[character] for character in token])
            except KeyError:
                # An added token that is not written in the alphabet stands for itself.
                known = token.encode()
            self._bytes[token_id] = known
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text that it stands inside of; b"" if it is no text."""
        if self.token(token_id) is None or self.is_special(token_id):
            return b""
        return self.own_bytes(token_id) or b""

    def own_bytes(self, token_id: int) -> bytes | None:
        """See `Detokenizer.own_bytes`."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            return self.bytes_of(token_id)
        if self.is_byte(token_id):
            return bytes([int(token[1:-1], 16)])
        text = self.token_text(token_id)
        return None if _REPLACEMENT in text and _REPLACEMENT not in token else text.encode()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            if self.token(token_id) is None:
                text = ""
            elif self._alphabet is not None:
                text = self.bytes_of(token_id).decode(errors="replace")
            else:
                # The second of two: only the first can have lost its space.
                text = self.decode([token_id, token_id])[len(self.decode([token_id])) :]
            self._texts[token_id] = text
        return text

    def is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self.token(token_id) or "") is not None

    def _context(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The last token of the prompt that shows in the text, whole; none if the output begins the text."""
        for token_id in reversed(prompt_token_ids):
            if self.shows(token_id, skip_special_tokens) and not self.is_byte(token_id):
                return [token_id]
        return []

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token has any part in the text."""
        return self.token(token_id) is not None and not (skip_special_tokens and self.is_special(token_id))


class _ByteLevelText:
    """For byte-level tokenizers: each token is a run of bytes, the text is their UTF-8."""

    def __init__(self, vocabulary: _Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip and self._vocabulary.is_special(token_id):
            return ""
        return self._utf8.decode(self._vocabulary.bytes_of(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """For any other tokenizer: decodes a short window, the last piece shown and what came since.

    The last piece is there because decoders treat the first token of a text differently. A window ends only where
    the text before it is certain: not within a run of byte tokens (a decoder with byte fallback decides on the run as
    a whole, and one wrong byte spoils all of it), not after a replacement character, and not after nothing.
    """

    def __init__(self, vocabulary: _Vocabulary, skip_special_tokens: bool, context: list[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._before = context
        self._pending: list[int] = []
        self._next_try = 0

    def push(self, token_id: int) -> str:
        if not self._vocabulary.shows(token_id, self._skip):
            return ""
        self._pending.append(token_id)
        if len(self._pending) < self._next_try or self._vocabulary.is_byte(token_id):
            return ""
        piece = self._piece()
        if not piece or piece.endswith(_REPLACEMENT):
            # Looking again after every token would make a long run of these cost its square.
            self._next_try = 2 * len(self._pending) if len(self._pending) > 8 else 0
            return ""
        self._before, self._pending, self._next_try = self._pending, [], 0
        return piece

    def finish(self) -> str:
        piece = self._piece() if self._pending else ""
        self._pending = []
        return piece

    def _piece(self) -> str:
        decode = self._vocabulary.decode
        shown = decode(self._before) if self._before else ""
        return decode([*self._before, *self._pending])[len(shown) :]


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the decoder maps each character to one byte and does nothing else; found out by trying it, since what
    stands in for the decoder in a switched tokenizer has no type to go by."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return False
    space = chr(0x100 + 0x20)
    return decoder.decode([space + "Ã", "©", space, "<0x41>"]) == " é <0x41>"


def _byte_alphabet() -> dict[str, int]:
    """Character to byte in byte-level BPE: bytes that print in Latin-1 stand for themselves, the others for the
    characters from U+0100 on, in order (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
