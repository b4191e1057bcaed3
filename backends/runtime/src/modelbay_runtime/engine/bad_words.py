"""Texts that a request does not want, as an automaton over tokens: made once for a list, followed by each sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from modelbay.errors import UsageError

Ints = npt.NDArray[np.int64]
_START = 0


class BadWords:
    """Token sequences that must not be completed.

    The automaton of Aho and Corasick (1975) over all but the last token of each: a place in it is the longest
    beginning of a word that the output ends in. So a step costs what could be completed there, not the list's length.

    Args:
        words: token ids of each; empty ones are passed over.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._last: list[dict[int, None]] = [{}]  # tokens that complete a word at each place
        for word in words:
            self._add(word)
        self._shorter = [_START] * len(self._last)  # the place of the longest other beginning that each one ends in
        self._nearest = [_START] * len(self._last)  # the next of those where a word can be completed
        self._link()
        self._single = np.array(list(self._last[_START]), dtype=np.int64)  # words of one token: never allowed

    def _add(self, word: Sequence[int]) -> None:
        if not word:
            return
        place = _START
        for token_id in word[:-1]:
            place = self._next.setdefault((place, token_id), len(self._last))
            if place == len(self._last):
                self._last.append({})
        self._last[place][word[-1]] = None

    def _link(self) -> None:
        children: list[list[tuple[int, int]]] = [[] for _ in self._last]
        for (parent, token_id), place in self._next.items():
            children[parent].append((token_id, place))
        level = children[_START]
        while level:  # level by level: what is shorter was linked before
            below: list[tuple[int, int]] = []
            for _, place in level:
                shorter = self._shorter[place]
                self._nearest[place] = shorter if self._last[shorter] else self._nearest[shorter]
                for token_id, child in children[place]:
                    self._shorter[child] = self.follow(shorter, token_id)
                    below.append((token_id, child))
            level = below

    def follow(self, place: int, token_id: int) -> int:
        """The place after one more token; 0 is where every output begins."""
        while (place, token_id) not in self._next and place != _START:
            place = self._shorter[place]
        return self._next.get((place, token_id), _START)

    def completing(self, place: int) -> Ints:
        """The tokens that would complete a word here; some perhaps twice."""
        found: list[int] = []
        while place != _START:
            found += self._last[place]
            place = self._nearest[place]
        return np.concatenate([np.array(found, dtype=np.int64), self._single]) if found else self._single


class BadWordWatch:
    """One sequence's place in the automaton. It reads the sequence's own growing list of output tokens."""

    def __init__(self, words: BadWords, output_token_ids: Sequence[int]) -> None:
        self._words = words
        self._output = output_token_ids
        self._place = _START
        self._read = 0

    def forbidden(self) -> Ints:
        """Tokens that must not come next."""
        while self._read < len(self._output):
            self._place = self._words.follow(self._place, self._output[self._read])
            self._read += 1
        return self._words.completing(self._place)


class BadWordLists:
    """The automata of one engine.

    Each is kept for as long as somebody holds it: requests that run with it do, and so does a server that had it made
    on another thread before it submits such a request.

    Args:
        tokenizer: encodes lists of texts; None where the model was loaded without one.
        vocab_size: the model's; a word with a token beyond it cannot be generated.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._made: WeakValueDictionary[tuple[str, ...], BadWords] = WeakValueDictionary()
        self._lock = threading.Lock()

    def automaton(self, texts: Iterable[str]) -> BadWords | None:
        """What forbids these texts; None where there are none. Any thread may ask.

        Raises:
            UsageError: there is no tokenizer.
        """
        key = tuple(texts)
        if not key:
            return None
        if self._tokenizer is None:
            raise UsageError("bad_words needs a tokenizer, and this model was loaded without one.")
        with self._lock:
            words = self._made.get(key)
        if words is None:
            words = BadWords(word for word in encode_bad_words(key, self._encode) if max(word) < self._vocab_size)
            with self._lock:
                self._made[key] = words
        return words

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded


def encode_bad_words(
    bad_words: Iterable[str], encode: Callable[[list[str]], Sequence[Sequence[int]]]
) -> list[tuple[int, ...]]:
    """The distinct token sequences, none of them empty, that spell each word at the start of a text and after a space.

    Args:
        encode: texts to token ids, without special tokens; all at once, since one by one takes many times as long.
    """
    spellings = dict.fromkeys(spelling for text in bad_words for spelling in (text, " " + text.lstrip()))
    return list(dict.fromkeys(tuple(ids) for ids in encode(list(spellings)) if len(ids)))
