"""Where each token of a text begins, in characters, also where a character is made of several tokens."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any


def _decoder(pending: bytes = b"") -> codecs.IncrementalDecoder:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(pending)
    return decoder


class Offsets:
    """Follows one text token by token. A token that is a part of a character begins where the character does.

    Args:
        detokenizer: `Detokenizer` of the model.
        special_ids: ids of special tokens.
        skip_special: whether the output's text leaves them out.
    """

    def __init__(self, detokenizer: Any, special_ids: Collection[int], *, skip_special: bool) -> None:
        self._detokenizer = detokenizer
        self._special = frozenset(special_ids)
        self._skip = skip_special
        self._at = 0
        self._utf8 = _decoder()
        self._run, self._run_at = b"", 0

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Of the tokens of a prompt with this text, which may lack a BOS or the space that a tokenizer begins with."""
        offsets = []
        for token_id in token_ids:
            offsets.append(min(self._begin(token_id), len(text)))
            self._add(token_id, less=self._hidden(token_id, text))
        self.skip(len(text))
        return offsets

    def skip(self, characters: int) -> None:
        """What comes next begins there."""
        self._at = characters
        self._utf8, self._run = _decoder(), b""

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Of the output's next tokens."""
        offsets = []
        for token_id in token_ids:
            hidden = self._skip and token_id in self._special
            offsets.append(self._at if hidden else self._begin(token_id))
            if not hidden:
                self._add(token_id)
        return offsets

    def _bytes(self, token_id: int) -> bytes:
        own = self._detokenizer.own_bytes(token_id)
        return str(self._detokenizer.token_text(token_id)).encode() if own is None else own

    def _hidden(self, token_id: int, text: str) -> int:
        """Characters of the token that ``text`` does not show where the token stands."""
        piece = self._bytes(token_id).decode(errors="replace")
        if text.startswith(piece, self._at):
            return 0
        if token_id in self._special:
            return len(piece)
        return int(piece.startswith(" ") and text.startswith(piece[1:], self._at))

    def _begin(self, token_id: int) -> int:
        """Where the token begins: after the character before it, unless the token belongs to that."""
        if self._run and not self._detokenizer.is_fallback_byte(token_id):
            self._end_run()
        pending, first = self._utf8.getstate()[0], self._bytes(token_id)[:1]
        if not pending or not first:
            return self._at
        decoder = _decoder(pending)
        text = decoder.decode(first)
        # Whole now, or waiting for more; else what was pending is broken, and replaced by one character.
        breaks = len(text) + bool(decoder.getstate()[0]) > 1
        return self._at + breaks

    def _add(self, token_id: int, less: int = 0) -> None:
        own = self._bytes(token_id)
        if self._detokenizer.is_fallback_byte(token_id):
            self._run_at = self._run_at if self._run else self._at
            self._run += own
        self._at += len(self._utf8.decode(own)) - less

    def _end_run(self) -> None:
        """Byte fallback decides on a run as a whole: where it is no text, each of its bytes is one character."""
        try:
            characters = len(self._run.decode())
        except UnicodeDecodeError:
            characters = len(self._run)
        self.skip(self._run_at + characters)
