"""Where a text may be cut so that its parts give the tokens that the whole gives, by what a tokenizer is made of.

A fast tokenizer splits a text at its added tokens, normalises the rest, splits it into words, and makes tokens of each
word. Where a word ends whatever comes before and after, the tokens of both sides are those of the whole text. The
splitters that are known here end a word between a letter and certain characters, such as a space. A tokenizer with any
part that is not known is never cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Letters that every normaliser leaves letters: none decomposes into a letter and a mark.
LETTERS = "A-Za-zא-תا-غف-يα-ρσ-ωΑ-ΡΣ-Ωа-ик-яА-ИК-Яक-नप-रव-हぁ-おな-のま-ろァ-オナ-ノマ-ロ一-龥가-힣"
_WHITE = frozenset(" \n\t")
_PUNCTUATION = frozenset(',.;:!?()[]{}"/，。、！？；：「」（）')
#: What normalisers make of such a character: added tokens may be looked for afterwards.
_IMAGES = {"，": ",", "！": "!", "？": "?", "；": ";", "：": ":", "（": "(", "）": ")", " ": "▁", "\n": " ", "\t": " "}

#: Normalisers that look at a character and the marks after it, or at the ends of the text.
_NORMALIZERS = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "StripAccents",
    "BertNormalizer",
    "Precompiled",
    "Prepend",
    "Strip",
}
#: What each splitter ends a word before, after a letter; those that take a word for granted end none.
_SPLITTERS = {
    "BertPreTokenizer": _WHITE | _PUNCTUATION,
    "Whitespace": _WHITE | _PUNCTUATION,
    "WhitespaceSplit": _WHITE,
    "Punctuation": _PUNCTUATION,
    "Digits": frozenset(),
}
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#: Alternatives of split patterns that together match every letter, with no cut character after it.
_WORDS = (
    {r" ?\p{L}+"},
    {r"[^\r\n\p{L}\p{N}]?\p{L}+"},
    {r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"},
    {r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"},
    {_CASED, _UPPER},
    {f"{_CASED}{_ENDING}?", f"{_UPPER}{_ENDING}?"},
)
#: And those beside them. None matches across such a place, and none tells a cut character from the end of the text.
_OTHERS = {
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    _ENDING,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r" ?\p{N}+",
    r"\p{N}",
    r"\p{N}+",
    r"\p{N}{1,3}",
    "[0-9][0-9][0-9]",
    "[0-9]",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
}
_KNOWN = _OTHERS.union(*_WORDS)


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is known of a tokenizer's texts.

    Args:
        before: characters before which a text may be cut, after a letter: the tokens of what comes before them are
            the first ones of the whole text.
        resumes: whether the tokens of a text from such a space on are the last ones of the whole text.
        token_bytes: for each byte, the length in bytes of the longest token that it may be in, 0 if it may leave no
            token; None: that is not known.
        composes: whether those are the bytes of the text in the form NFC.
    """

    before: frozenset[str] = frozenset()
    resumes: bool = False
    token_bytes: tuple[int, ...] | None = None
    composes: bool = False


def find_cuts(engine: Any, vocab: Mapping[str, int], added: Iterable[Any]) -> Cuts:
    """What is known of a Rust tokenizer.

    Args:
        vocab: token -> id, added ones too.
        added: its ``AddedToken``s.
    """
    tokens = list(added)
    normalizers, splitters = list(described(engine.normalizer)), list(described(engine.pre_tokenizer))
    if getattr(engine.model, "dropout", None) or not all(map(_is_local, normalizers)):
        return Cuts()
    ends = _word_ends(normalizers, splitters)
    if not ends and _is_whole_text(engine.model, normalizers, splitters, vocab):
        ends = frozenset(" ")
    kinds = {part["type"] for part in normalizers}
    clumsy = any(
        (token.rstrip and not token.content[-1:].isspace()) or (token.single_word and token.content[:1].isspace())
        for token in tokens
    )
    return Cuts(
        frozenset(char for char in ends if not any(_holds(token, char, kinds) for token in tokens)),
        not kinds & {"Prepend", "Strip"} and not clumsy,
        _byte_bounds(engine.model, kinds, splitters, vocab, tokens),
        "NFC" in kinds,
    )


def described(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or a pre-tokenizer, as tokenizer.json writes them."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        inner = part.get("normalizers", part.get("pretokenizers"))
        if inner is None:
            yield part
        else:
            waiting[:0] = inner


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _NORMALIZERS
    return normalizer["pattern"] in ({"String": " "}, {"Regex": " {2,}"}) and normalizer["content"] in ("▁", " ")


def _word_ends(normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]]) -> frozenset[str]:
    """Characters before which some splitter ends a word, after a letter."""
    marked = [part["pattern"] for part in normalizers if part["type"] == "Replace" and part["content"] == "▁"]
    found = [_ends(part, {"String": " "} in marked, bool(marked)) for part in splitters]
    if any(part["type"] == "ByteLevel" for part in splitters[:-1]):  # later ones see other characters than the text's
        return frozenset()
    if any(ends is None for ends in found):
        return frozenset()
    return frozenset().union(*(ends for ends in found if ends))


def _ends(splitter: dict[str, Any], replaced: bool, marked: bool) -> frozenset[str] | None:
    """Args:
    replaced: whether spaces have become marks by then.
    marked: whether some of them have, as those that stand together.

    Returns None if it is not known where it splits.
    """
    kind = splitter["type"]
    if marked and kind == "WhitespaceSplit":
        return _WHITE - {" "}
    if marked and kind not in ("Metaspace", "Split", "Digits"):
        return None
    if kind == "ByteLevel":
        return _WHITE | _PUNCTUATION if splitter["use_regex"] else frozenset()
    if kind == "Metaspace":
        splits = splitter["split"] and splitter["replacement"] == "▁" and not replaced
        return frozenset(" ") if splits else frozenset()
    if kind == "Punctuation" and splitter["behavior"] not in ("Isolated", "Removed", "Contiguous", "MergedWithNext"):
        return frozenset()
    if kind != "Split":
        return _SPLITTERS.get(kind)
    if splitter["pattern"] == {"String": " "} and replaced:
        return frozenset()
    pattern = splitter["pattern"].get("Regex", "(").replace("\r", r"\r").replace("\n", r"\n")
    alternatives = set(_alternatives(pattern))
    keeps = (splitter["behavior"], splitter["invert"]) in (("Isolated", False), ("Removed", True))
    if marked or not keeps or not alternatives <= _KNOWN:
        return None
    return _WHITE | _PUNCTUATION if any(words <= alternatives for words in _WORDS) else frozenset()


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern, of which none has one of its own outside of a group or a class."""
    found, start, depth, in_class, position = [], 0, 0, False, 0
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif in_class:
            in_class = char != "]"
        elif char == "|" and depth == 0:
            found.append(pattern[start:position])
            start = position + 1
        else:
            in_class = char == "["
            depth += (char == "(") - (char == ")")
        position += 1
    return [*found, pattern[start:]]


def _is_whole_text(
    model: Any, normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]], vocab: Mapping[str, int]
) -> bool:
    """Whether it is a BPE of whole texts, with a mark for each space, where nothing is ever merged over such a mark
    after a letter: no token holds both."""
    marks = any(part == {"type": "Replace", "pattern": {"String": " "}, "content": "▁"} for part in normalizers)
    unsplit = all(
        (part["type"] == "Metaspace" and not part["split"] and part["replacement"] == "▁")
        or (part["type"] == "Split" and part["pattern"] == {"String": " "} and marks)
        for part in splitters
    )
    marks = marks or any(part["type"] == "Metaspace" for part in splitters)
    if type(model).__name__ != "BPE" or not marks or not unsplit or "▁" not in vocab:
        return False
    over = re.compile(f"[{LETTERS}]▁")
    return not any(over.search(token) for token in vocab)


def _holds(token: Any, char: str, normalizers: set[str]) -> bool:
    """Whether an added token may begin before such a cut and end after it."""
    images = {char}
    if token.normalized and normalizers:  # it is looked for in what they make of the text
        images.add(_IMAGES.get(char, char))
    if "Replace" not in normalizers:
        images.discard("▁")
    return any(re.search(rf"[^\s▁]{re.escape(image)}", token.content) for image in images)


def _byte_bounds(
    model: Any, normalizers: set[str], splitters: list[dict[str, Any]], vocab: Mapping[str, int], added: list[Any]
) -> tuple[int, ...] | None:
    """For each byte the length of the longest token that it may be in, of a byte-level BPE. 0: it leaves no token."""
    keep = all(
        part["type"] in ("ByteLevel", "Digits") or (part["type"] == "Split" and part["behavior"] == "Isolated")
        for part in splitters
    )
    to_bytes = [part["type"] == "ByteLevel" for part in splitters].count(True) == 1 and splitters[-1][
        "type"
    ] == "ByteLevel"
    if type(model).__name__ != "BPE" or not keep or not to_bytes or normalizers - {"NFC"}:
        return None
    if any(token.lstrip or token.rstrip for token in added):  # such a token takes all white space beside it
        return None
    characters = _byte_characters()
    contents = {token.content for token in added}
    longest: dict[str, int] = {}
    for token in sorted((token for token in vocab if token not in contents), key=len, reverse=True):
        if len(longest) == 256 or not token:
            break
        for char in token:
            longest.setdefault(char, len(token))
    bounds = [longest.get(char, 0) if char in vocab else 0 for char in characters]
    for content in contents:
        data = content.encode()
        for byte in set(data):
            bounds[byte] = max(bounds[byte], len(data)) if bounds[byte] else 0
    return tuple(bounds)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it can be seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]
