"""Tokens of texts that may be far longer than a model takes, at a cost that the model's length sets.

A text that is refused, or of which only one end is kept, is encoded as far as that is decided: growing parts of it,
cut where `modelbay.tokenizer.cuts` says that the parts give the whole's tokens, and the whole text where it says
nothing. The ids are always those that the whole text would give.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from modelbay.errors import UsageError
from modelbay.tokenizer.cuts import LETTERS, Cuts

#: Characters of the first part: so many for each token, and at least so many. Most texts that are not refused fit.
_PER_TOKEN, _LEAST, _GROWTH = 8, 32_768, 4
_WINDOW = 4096

Encode = Callable[[str], list[int]]


class TooManyTokens(UsageError):
    """A text has more tokens than were asked for; how many more was not counted."""

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        super().__init__(f"the text has more than {at_most} tokens.")


def encode_at_most(tokenizer: Any, text: str, encode: Encode, at_most: int) -> list[int]:
    """The ids of a text, unless they are too many. A text that is not long is encoded whole, whatever comes of it.

    Raises:
        TooManyTokens: there are more than ``at_most``.
    """
    if is_long(text, at_most) and fewest_tokens(tokenizer, text) > at_most:
        raise TooManyTokens(at_most)
    ids, is_whole = _enough(heads(tokenizer, text, at_most), text, encode, at_most + 1)
    if not is_whole:
        raise TooManyTokens(at_most)
    return ids


def encode_beginning(tokenizer: Any, text: str, encode: Encode, count: int) -> list[int]:
    """What ``encode`` makes of the text, for one that gives at most ``count`` ids, the first of the text's."""
    return _enough(heads(tokenizer, text, count), text, encode, count)[0]


def encode_end(tokenizer: Any, text: str, encode: Encode, count: int) -> list[int]:
    """Ids of which the last ``count`` are the text's, or all of its ids if it has fewer."""
    return _enough(tails(tokenizer, text, count), text, encode, count)[0]


def _enough(parts: Iterable[str], text: str, encode: Encode, count: int) -> tuple[list[int], bool]:
    """The ids of the first of growing parts that has ``count`` of them, else of the last, which is the text; and
    whether it is."""
    for part in parts:
        ids = encode(part)
        if len(part) == len(text):
            return ids, True
        if len(ids) >= count:
            return ids, False
    raise AssertionError("the last part is the text")


def is_long(text: str, count: int) -> bool:
    """Whether a text is worth cutting where so many tokens of it matter."""
    return len(text) > _first(count)


def parts_of_pair(
    tokenizer: Any, pair: tuple[str, str], count_tokens: Callable[[str], int], room: int
) -> tuple[str, str]:
    """Beginnings of two texts that "longest_first" cuts, from the right, to what it cuts the texts to.

    It keeps a text of at most half the room, and gives the other what is left; where both are longer than the room,
    only which of them is longer still matters, and that only for an odd token.

    Args:
        count_tokens: tokens of a text, without special ones.
        room: tokens of both texts that stay.
    """
    if not any(is_long(text, room) for text in pair):
        return pair
    parts, counts = [], []
    for text in pair:
        for head in heads(tokenizer, text, room):
            count = count_tokens(head)
            if len(head) == len(text) or count > room:
                break
        parts.append(head)
        counts.append(count)
    if room % 2 and min(counts) > room:
        return pair
    return parts[0], parts[1]


def heads(tokenizer: Any, text: str, count: int) -> Iterator[str]:
    """Beginnings of a text whose tokens are its first ones, each longer than the one before, the last the text."""
    pattern = _pattern(_cuts(tokenizer).before)
    for size in () if pattern is None else _sizes(text, count):
        # The last place of this part, looked for from its end.
        for stop in range(size, size // 2, -_WINDOW):
            assert pattern is not None
            places = [match.end() for match in pattern.finditer(text, max(stop - _WINDOW, 0), stop + 1)]
            if places:
                yield text[: places[-1]]
                break
    yield text


def tails(tokenizer: Any, text: str, count: int) -> Iterator[str]:
    """Ends of a text whose tokens, but for special ones before them, are its last ones; the last is the text."""
    cuts = _cuts(tokenizer)
    pattern = _pattern(cuts.before & {" "}) if cuts.resumes else None
    for size in () if pattern is None else _sizes(text, count):
        assert pattern is not None
        match = pattern.search(text, len(text) - size, len(text) - size // 2)
        if match:
            yield text[match.end() :]
    yield text


def fewest_tokens(tokenizer: Any, text: str) -> int:
    """At least so many tokens has the text, by its bytes; 0 if they say nothing.

    Each byte counts as its share of the longest token it may be in: the bytes of a token make up one at most.
    """
    cuts = _cuts(tokenizer)
    if cuts.token_bytes is None:
        return 0
    data = (unicodedata.normalize("NFC", text) if cuts.composes else text).encode()
    longest = cuts.token_bytes
    shares = sum(data.count(byte) / longest[byte] for byte in set(data) if longest[byte])
    return int(shares * (1 - 1e-9))


def _cuts(tokenizer: Any) -> Cuts:
    return getattr(tokenizer, "text_cuts", None) or Cuts()


def _first(count: int) -> int:
    return max(_PER_TOKEN * count, _LEAST)


def _sizes(text: str, count: int) -> Iterator[int]:
    size = _first(count)
    while size < len(text):
        yield size
        size *= _GROWTH


def _pattern(before: frozenset[str]) -> re.Pattern[str] | None:
    return re.compile(f"[{LETTERS}](?=[{re.escape(''.join(sorted(before)))}])") if before else None
