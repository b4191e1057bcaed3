"""T2: texts far longer than a model takes: the whole text's ids, without encoding the whole text."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from modelbay.errors import UsageError
from modelbay.tokenizer import (
    TooManyTokens,
    bounded,
    cached,
    encode_at_most,
    encode_beginning,
    encode_chat,
    encode_end,
    encode_prompt,
    parts_of_pair,
)
from modelbay.tokenizer.cuts import LETTERS
from modelbay_testing import assets

REAL: dict[str, Callable[[], Any]] = {
    "smollm2": lambda: assets.smollm2_dir("float32"),
    "minilm": assets.minilm_dir,
    "qwen3": assets.qwen3_tokenizer_dir,
    "deepseek": assets.deepseek_v3_tokenizer_dir,
}
FRAGMENTS = (
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\x00", "\u0301",
    "a", "I", "the", "don't", "'s", "' re", "é", "e\u0301", "ñ", "й", "Straße", "ǅ", "ß", "İ", "ﬁ", "Ａ", "！",
    "Σίσυφος", "שלום", "سلام", "हिन्दी",
    "好", "你好", "世界。", "，", "が", "か\u3099", "한국어",
    "1", "12345", "3.14", ",", ".", "...", "!?", "(", "](", '{"a": ', "//", "_x", "-", "—",
    "🙂", "👩\u200d👩\u200d👧", "a" * 120, "=" * 70, "x y", "word, word",
    "<|im_start|>", "<|endoftext|>", "[MASK]", "[CLS]", "<｜User｜>", "<s>", "</s>", "<mask>",
)  # fmt: skip
TEXTS = (
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=60)
    .map("".join)
    .filter(lambda text: text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text))
)


@cache
def real(name: str, side: str = "right") -> Any:
    from transformers import AutoTokenizer

    return cached(AutoTokenizer.from_pretrained(REAL[name](), truncation_side=side))


def made(model: Any, normalizer: Any = None, splitter: Any = None, added: list[AddedToken] | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    engine = Tokenizer(model)
    if normalizer is not None:
        engine.normalizer = normalizer
    if splitter is not None:
        engine.pre_tokenizer = splitter
    engine.decoder = decoders.Fuse()
    engine.add_special_tokens(added or [AddedToken("<mask>", lstrip=True), AddedToken("<s>", normalized=True)])
    return cached(PreTrainedTokenizerFast(tokenizer_object=engine))


CHARACTERS = {char: index for index, char in enumerate("▁abcdefghijklmnopqrstuvwxyzI.,!?'1234 \n好你")}
MERGES = [("▁", "a"), ("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("o", "r"), ("a", "a"), ("aa", "aa")]


def bpe(*more: tuple[str, str]) -> Any:
    merges = [*MERGES, *more]
    vocab = {**CHARACTERS, "Ġ": 99, "<unk>": 100, **{left + right: 101 + i for i, (left, right) in enumerate(merges)}}
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)


def unigram() -> Any:
    pieces = [("<unk>", 0.0), *((char, -5.0) for char in CHARACTERS), ("▁the", -2.0), ("▁a", -2.5), ("aa", -3.0)]
    return models.Unigram(pieces, unk_id=0)


SPACES = {
    "prepend": (normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "runs": (normalizers.NFKC(), normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")),
}
SMALL: dict[str, Callable[[], Any]] = {
    "whole texts": lambda: made(bpe(), normalizers.Sequence(list(SPACES["prepend"]))),
    "whole texts, metaspace": lambda: made(bpe(), None, pre_tokenizers.Metaspace(split=False, prepend_scheme="first")),
    "gemma": lambda: made(bpe(), normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "unigram": lambda: made(unigram(), normalizers.Sequence(list(SPACES["runs"])), pre_tokenizers.Metaspace()),
    "unigram, words": lambda: made(
        unigram(), normalizers.Sequence(list(SPACES["runs"])),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "prefix space": lambda: made(bpe(), None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "right strip": lambda: made(
        bpe(), None, pre_tokenizers.Whitespace(), [AddedToken("the", rstrip=True, single_word=True)]
    ),
    "punctuation stays": lambda: made(bpe(("e", ",")), None, pre_tokenizers.Punctuation("merged_with_previous")),
    "bytes first": lambda: made(
        bpe(("e", "Ġ")), None,
        pre_tokenizers.Sequence([
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(r" ?\p{L}+"), "isolated"),
        ]),
    ),
    "spaces in a token": lambda: made(bpe(), None, pre_tokenizers.Whitespace(), [AddedToken("a b"), AddedToken("  ")]),
}  # fmt: skip
NEVER_AT_SPACES = ("punctuation stays", "bytes first", "spaces in a token")
small = cache(lambda name: SMALL[name]())


@pytest.fixture
def short_parts(monkeypatch):
    """Parts of a few characters, so that short texts are cut too."""
    monkeypatch.setattr(bounded, "_LEAST", 6)
    monkeypatch.setattr(bounded, "_PER_TOKEN", 1)
    monkeypatch.setattr(bounded, "_GROWTH", 2)
    monkeypatch.setattr(bounded, "_WINDOW", 5)


def check_same(tokenizer: Any, text: str, count: int) -> None:
    """Bounded and full encoding agree on what is refused, and on the ids of what is not."""
    full = encode_prompt(tokenizer, text)
    assert bounded.fewest_tokens(tokenizer, text) <= len(full)
    if len(full) <= count:
        assert encode_prompt(tokenizer, text, at_most=count) == full
        assert encode_chat(tokenizer, text, at_most=count) == encode_chat(tokenizer, text)
    else:
        with suppress(TooManyTokens):
            assert encode_prompt(tokenizer, text, at_most=count) == full  # not long: the caller counts
    assert encode_prompt(tokenizer, text, last=count)[-count:] == full[-count:]
    assert encode_chat(tokenizer, text, last=count)[-count:] == encode_chat(tokenizer, text)[-count:]
    longest = tokenizer.num_special_tokens_to_add() + count

    def cut(part: str) -> list[int]:
        return list(tokenizer(part, truncation=True, max_length=longest)["input_ids"])

    ends = encode_beginning if tokenizer.truncation_side == "right" else encode_end
    assert ends(tokenizer, text, cut, longest) == cut(text)


@pytest.mark.parametrize(
    ("name", "side"), [(name, "right") for name in REAL] + [("minilm", "left"), ("smollm2", "left")]
)
def test_t2_bounded_is_full_with_real_tokenizers(name: str, side: str, short_parts: None) -> None:
    tokenizer = real(name, side)
    assert " " in tokenizer.text_cuts.before, "else nothing is tested"

    @settings(max_examples=120, deadline=None)
    @given(TEXTS, st.integers(1, 40))
    def check(text: str, count: int) -> None:
        check_same(tokenizer, text, count)

    check()


@pytest.mark.parametrize("name", SMALL)
def test_t2_bounded_is_full_with_other_kinds(name: str, short_parts: None) -> None:
    tokenizer = small(name)
    assert (" " in tokenizer.text_cuts.before) == (name not in NEVER_AT_SPACES)

    @settings(max_examples=80, deadline=None)
    @given(TEXTS, st.integers(1, 40))
    def check(text: str, count: int) -> None:
        check_same(tokenizer, text, count)

    check()


@pytest.mark.parametrize("name", [*REAL, *SMALL])
def test_t2_every_place_that_may_be_cut(name: str) -> None:
    """The tokens on both sides of it are the whole text's."""
    tokenizer = real(name) if name in REAL else small(name)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @settings(max_examples=120, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        whole = ids(text)
        pattern = bounded._pattern(tokenizer.text_cuts.before)
        for match in pattern.finditer(text) if pattern else ():
            place = match.end()
            head = ids(text[:place])
            assert head == whole[: len(head)], (text[:place], text[place:])
            if text[place] == " " and tokenizer.text_cuts.resumes:
                assert head + ids(text[place:]) == whole, (text[:place], text[place:])

    check()


@pytest.mark.parametrize("name", ["minilm", "smollm2"])
def test_t2_pairs(name: str, short_parts: None) -> None:
    tokenizer = real(name)

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @settings(max_examples=120, deadline=None)
    @given(TEXTS, TEXTS, st.integers(1, 30))
    def check(first: str, second: str, room: int) -> None:
        longest = room + tokenizer.num_special_tokens_to_add(pair=True)
        parts = parts_of_pair(tokenizer, (first, second), count_tokens, room)
        wanted = tokenizer(first, second, truncation="longest_first", max_length=longest)
        assert tokenizer(*parts, truncation="longest_first", max_length=longest) == wanted

    check()


MEGABYTES = {
    "words": "a " * 2_000_000,
    "commas": "好好，" * 1_400_000,
    "lines": "word\n" * 800_000,
    "one": "a" * 4_000_000,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    # A WordPiece has one token for a word of any length: only the whole word shows it.
    [(name, kind) for name in REAL for kind in MEGABYTES if (name, kind) != ("minilm", "one")],
)
def test_t2_a_text_of_megabytes_is_hardly_encoded(name: str, kind: str) -> None:
    tokenizer, text = real(name), MEGABYTES[kind]
    given: list[int] = []

    def encode(part: str) -> list[int]:
        given.append(len(part))
        return list(tokenizer(part, verbose=False)["input_ids"])

    with pytest.raises(TooManyTokens, match="more than 8000 tokens"):
        encode_at_most(tokenizer, text, encode, 8000)
    assert sum(given) < 400_000
    if " " in text:
        assert len(encode_beginning(tokenizer, text, encode, 8000)) >= 8000
        assert encode_end(tokenizer, text, encode, 8000)[-4:] == encode("a a a " * 9)[-4:]
        assert sum(given) < 900_000


def test_t2_an_unknown_part_is_never_cut() -> None:
    """Nothing is guessed: the text is encoded whole."""
    odd = [
        made(bpe(), None, pre_tokenizers.Split(Regex(r"[^|]*"), "isolated")),
        made(bpe(), None, pre_tokenizers.UnicodeScripts()),
        made(bpe(), normalizers.Replace(Regex("a b"), ""), pre_tokenizers.Whitespace()),
        made(bpe(("e", "▁")), normalizers.Replace(" ", "▁")),
        made(models.BPE({"a": 0, " ": 1}, [], dropout=0.5), None, pre_tokenizers.Whitespace()),
    ]
    for tokenizer in odd:
        assert not tokenizer.text_cuts.before
        assert tokenizer.text_cuts.token_bytes is None
        assert list(bounded.heads(tokenizer, "a b " * 50_000, 10)) == ["a b " * 50_000]


def test_t2_a_class_that_encodes_in_its_own_way_is_never_cut() -> None:
    class Own(type(real("smollm2")).__bases__[-1]):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text[::-1], *args, **kwargs)

    assert not cached(Own.from_pretrained(REAL["smollm2"]())).text_cuts.before


def test_t2_cuts_follow_added_tokens() -> None:
    tokenizer = SMALL["right strip"]()
    assert " " in tokenizer.text_cuts.before
    tokenizer.add_tokens(["b c"])
    assert " " not in tokenizer.text_cuts.before


def test_t2_half_a_character_far_into_a_long_text_is_refused() -> None:
    with pytest.raises(UsageError, match="character 200000 is half of one"):
        encode_prompt(real("minilm"), "a " * 100_000 + "\ud800", at_most=10)


def test_letters_stay_letters() -> None:
    """What `LETTERS` says of itself."""
    import re

    letters = [chr(code) for code in range(0x110000) if re.match(f"[{LETTERS}]", chr(code))]
    assert len(letters) > 30_000
    for letter in letters:
        assert letter.isalpha()
        assert unicodedata.normalize("NFKD", letter) == letter or "가" <= letter <= "힣"
