"""Streaming text: T5 (the joined deltas equal the full decode, no prompt in them), stop strings and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from modelbay_runtime.engine.detokenizer import Detokenizer, TextStream
from modelbay_runtime.engine.stop_strings import StopStrings
from modelbay_runtime.sampling_params import SamplingParams
from modelbay_testing.assets import deepseek_v3_tokenizer_dir, or_skip, qwen3_tokenizer_dir, smollm2_dir

REPLACEMENT = "\ufffd"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
TEXT = "Hello, wörld! 안녕하세요 — 日本語, emoji 👩‍👩‍👧 and 😀😀.\n\n\tdef f(x):\n    return  x\n"


def finished(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words", special=False)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **special)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), ("Ã", "¶"), ("ð", "Ł"), ("ĺ", "Ģ"), ("l", "o"), ("Ġw", "Ã¶")]
    vocab = {token: place for place, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Written in the byte alphabet's own characters: as bytes they are not UTF-8.
    tokenizer.add_tokens([AddedToken("Éé", special=False)])
    return finished(tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral: the first space of a text is stripped."""
    words = ["▁", "▁world", "▁a", "b", "o", "!", "▁▁", "ö", "\n", REPLACEMENT]
    vocab = {token: place for place, token in enumerate(["<unk>", *BYTE_TOKENS, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return finished(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Unigram with a Metaspace decoder, as T5 and XLM-R."""
    words = ["▁", "▁world", "▁a", "b", "o", "!", "▁b", "ö"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in words)], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return finished(tokenizer)


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "play", "##ing", "run", "##s", "!", "'", "##é"]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return finished(tokenizer)


@cache
def plain_words() -> PreTrainedTokenizerFast:
    """No decoder at all: tokens joined by spaces."""
    vocab = {word: place for place, word in enumerate(["x", "yy", "[UNK]", "z!"])}
    return finished(Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]")))


@cache
def slow() -> Any:
    """Written in Python: a token for each byte, and a decode that drops what is not UTF-8."""
    return ByT5Tokenizer(extra_ids=2)


class _ReplacingByT5(ByT5Tokenizer):
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        special = {*self.added_tokens_encoder, *self.special_tokens_map.values()}
        return b"".join(
            token.encode() if token in special else bytes([ord(character) for character in token]) for token in tokens
        ).decode(errors="replace")


@cache
def slow_replacing() -> Any:
    """The same, with a decode that puts U+FFFD for what is not UTF-8."""
    return _ReplacingByT5(extra_ids=2)


KINDS: list[Callable[[], Any]] = [
    byte_level, byte_fallback, metaspace, wordpiece, plain_words, slow, slow_replacing
]  # fmt: skip


def stream(tokenizer: Any, output: Sequence[int], *, prompt: Sequence[int] = (), **params: Any) -> list[str]:
    """The deltas, one per token and one for the end, of a sequence that nothing stops."""
    text = Detokenizer(tokenizer).stream(SamplingParams(**params), prompt)
    deltas = [text.append(token_id).delta for token_id in output]
    deltas.append(text.finish().delta)
    assert "".join(deltas) == text.text
    return deltas


def decode(tokenizer: Any, ids: Sequence[int], skip: bool) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def ids_of(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    # Two ids past the end: legal where the model's vocabulary is larger than the tokenizer's (T3).
    return st.lists(st.integers(0, len(tokenizer) + 1), max_size=40)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("skip", [True, False])
def test_t5_joined_deltas_equal_the_full_decode(kind: Callable[[], Any], skip: bool) -> None:
    tokenizer = kind()
    known = range(len(tokenizer))
    past_the_end = [] if kind in (slow, slow_replacing) else [len(tokenizer), len(tokenizer) + 1]

    @settings(max_examples=250, deadline=None)
    @given(output=st.lists(st.sampled_from([*known, *past_the_end]), max_size=40))
    def check(output: list[int]) -> None:
        assert "".join(stream(tokenizer, output, skip_special_tokens=skip)) == decode(tokenizer, output, skip)

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("skip", [True, False])
def test_t5_after_a_prompt_the_text_is_its_continuation(kind: Callable[[], Any], skip: bool) -> None:
    """decode(prompt + output) = decode(prompt) + text, where the prompt does not end within a character."""
    tokenizer = kind()
    whole = [
        token_id
        for token_id in range(len(tokenizer))
        if token_id not in tokenizer.all_special_ids
        # Part of a character is no text at all where a decoder ignores it.
        and (text := decode(tokenizer, [token_id], False)) and text.isascii()
        and not str(tokenizer.convert_ids_to_tokens(token_id)).startswith("<0x")
    ]  # fmt: skip
    bos = tokenizer.convert_tokens_to_ids("</s>" if kind in (slow, slow_replacing) else "<s>")

    @settings(max_examples=150, deadline=None)
    @given(
        prompt=st.lists(st.sampled_from([*whole, bos]), max_size=6),
        output=st.lists(st.integers(0, len(tokenizer) - 1), max_size=20),
    )
    def check(prompt: list[int], output: list[int]) -> None:
        text = "".join(stream(tokenizer, output, prompt=prompt, skip_special_tokens=skip))
        assert decode(tokenizer, prompt, skip) + text == decode(tokenizer, prompt + output, skip)

    check()


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, slow, slow_replacing], ids=lambda kind: kind.__name__)
def test_t5_any_bytes_in_any_split(kind: Callable[[], Any]) -> None:
    tokenizer = kind()
    if kind is byte_level:
        byte_of = {byte: tokenizer.convert_tokens_to_ids(token) for byte, token in alphabet().items()}
    elif kind is byte_fallback:
        byte_of = {byte: tokenizer.convert_tokens_to_ids(token) for byte, token in enumerate(BYTE_TOKENS)}
    else:
        byte_of = {byte: byte + 3 for byte in range(256)}
    some_bytes = st.one_of(st.binary(max_size=24), st.text(max_size=12).map(str.encode))

    @settings(max_examples=250, deadline=None)
    @given(data=some_bytes, cut=st.integers(0, 30))
    def check(data: bytes, cut: int) -> None:
        ids = [byte_of[byte] for byte in data[: len(data) - cut or None]]
        deltas = stream(tokenizer, ids)
        assert "".join(deltas) == decode(tokenizer, ids, True)

    check()


def alphabet() -> dict[int, str]:
    """Byte to its character in byte-level BPE, from the tokenizers library itself."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    table = {byte: encoder.pre_tokenize_str(chr(byte))[0][0] for byte in range(0x80)}
    for code in (*range(0x80, 0x800), *range(0x800, 0x10000, 0x40), *range(0x10000, 0x110000, 0x1000)):
        if 0xD800 <= code < 0xE000:
            continue
        pieces = encoder.pre_tokenize_str(chr(code))[0][0]
        table.update(zip(chr(code).encode(), pieces, strict=True))
    # Bytes that no UTF-8 text holds: the characters that are left, in order.
    left = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(table.values()))
    return table | dict(zip(sorted(set(range(256)) - set(table)), left, strict=True))


def test_t5_an_unfinished_character_is_held_back_until_it_is_whole() -> None:
    """Case 27, for byte fallback."""
    for tokenizer in (byte_level(), byte_fallback()):
        table = alphabet() if tokenizer is byte_level() else dict(enumerate(BYTE_TOKENS))
        smile = [tokenizer.convert_tokens_to_ids(table[byte]) for byte in "😀".encode()]
        end = [tokenizer.convert_tokens_to_ids("!")]
        deltas = stream(tokenizer, smile + end)
        assert deltas[:3] == ["", "", ""]
        assert "".join(deltas) == "😀!"
        assert "".join(stream(tokenizer, smile[:3])) == decode(tokenizer, smile[:3], True)
        assert stream(tokenizer, smile[:3])[:3] == ["", "", ""]


def test_t5_two_bytes_in_two_tokens() -> None:
    """Case 27."""
    ids = [byte_level().convert_tokens_to_ids(alphabet()[byte]) for byte in (0xC4, 0x8F)]
    assert stream(byte_level(), ids) == ["", "ď", ""]


def test_t5_the_prompt_never_leaks_into_the_first_delta() -> None:
    """Not even when it ends within a character: then the rest of it stands alone, as in the full decode."""
    table = alphabet()
    first, second = (byte_level().convert_tokens_to_ids(table[byte]) for byte in "é".encode())
    mark = byte_level().convert_tokens_to_ids("!")
    assert stream(byte_level(), [mark], prompt=[first]) == ["!", ""]
    assert "".join(stream(byte_level(), [second, mark], prompt=[mark, first])) == REPLACEMENT + "!"
    llama = byte_fallback()
    first, second = (llama.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é".encode())
    mark = llama.convert_tokens_to_ids("!")
    assert "".join(stream(llama, [second, mark], prompt=[mark, first])) == REPLACEMENT + "!"
    assert "".join(stream(llama, [mark], prompt=[mark, first, second])) == "!"


def test_the_space_before_a_first_word_is_kept_where_the_prompt_has_text() -> None:
    for tokenizer in (byte_fallback(), metaspace()):
        world, bang, bos = (tokenizer.convert_tokens_to_ids(token) for token in ("▁world", "!", "<s>"))
        assert "".join(stream(tokenizer, [world], prompt=[bos, bang])) == " world"
        assert "".join(stream(tokenizer, [world], prompt=[bos])) == "world"
        assert "".join(stream(tokenizer, [world], prompt=[])) == "world"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_token_costs_the_same_however_long_the_text_is(kind: Callable[[], Any]) -> None:
    tokenizer = kind()

    class Watched:
        """Counts the ids it is given to decode."""

        lengths: list[int] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **kwargs: Any) -> str:
            self.lengths.append(len(ids))
            return tokenizer.decode(ids, **kwargs)

    watched = Watched()
    watched.lengths.clear()
    output = [token_id for token_id in range(len(tokenizer)) if token_id not in tokenizer.all_special_ids] * 200
    stream(watched, output[:3000])
    stream(watched, [output[-1]] * 3000)
    assert sum(watched.lengths) <= 6 * 6000


def test_token_text_is_the_text_within_a_text() -> None:
    assert text_of(byte_fallback(), "▁world") == " world"
    assert text_of(byte_fallback(), "<0xC3>") == REPLACEMENT
    assert text_of(byte_level(), "Ġw") == " w"
    assert text_of(byte_level(), "</s>") == "</s>"
    assert text_of(byte_level(), "two words") == "two words"
    assert text_of(wordpiece(), "##ing") == "ing"
    assert Detokenizer(byte_level()).token_text(10**6) == ""
    assert Detokenizer(None).token_text(3) == ""


def text_of(tokenizer: Any, token: str) -> str:
    return Detokenizer(tokenizer).token_text(tokenizer.convert_tokens_to_ids(token))


def test_no_text_where_none_is_asked_for_or_possible() -> None:
    ids = byte_level().encode("hello")
    assert "".join(stream(byte_level(), ids, detokenize=False)) == ""
    assert "".join(stream(None, ids)) == ""


# Stopping


def run(text: TextStream, output: Sequence[int]) -> tuple[str, Any, int]:
    """(text shown, (finish_reason, stop_reason), tokens used)."""
    shown = ""
    for used, token_id in enumerate(output, start=1):
        update = text.append(token_id)
        shown += update.delta
        if update.finish_reason is not None:
            assert shown == text.text
            return shown, (update.finish_reason, update.stop_reason), used
    update = text.finish()
    shown += update.delta
    assert shown == text.text
    return shown, (update.finish_reason, update.stop_reason), len(output)


def generate(words: str, *, eos: Sequence[int] = (), extra: Sequence[int] = (), **params: Any) -> tuple[str, Any, int]:
    """Feed text letter by letter (each one token) through a byte-level tokenizer."""
    ids = [byte_level().convert_tokens_to_ids(character.replace(" ", "Ġ")) for character in words]
    params = {"max_tokens": None, **params}
    return run(Detokenizer(byte_level(), eos).stream(SamplingParams(**params)), [*ids, *extra])


def test_a_stop_string_ends_the_text_before_it() -> None:
    assert generate("one END two", stop="END") == ("one ", ("stop", "END"), 7)
    assert generate("one END two", stop=["two", "END"]) == ("one ", ("stop", "END"), 7)
    assert generate("one END two", stop="END", include_stop_str_in_output=True) == ("one END", ("stop", "END"), 7)
    assert generate("one EN", stop="END") == ("one EN", (None, None), 6)


def test_a_stop_string_inside_the_text_of_one_token_cuts_it() -> None:
    ids = [byte_level().convert_tokens_to_ids(token) for token in ("a", "two words", "b")]
    text = Detokenizer(byte_level()).stream(SamplingParams(stop="o w"))
    assert run(text, ids) == ("atw", ("stop", "o w"), 2)


def test_what_may_begin_a_stop_string_is_never_shown_too_early() -> None:
    ids = [byte_level().convert_tokens_to_ids(character) for character in "xababac"]
    text = Detokenizer(byte_level()).stream(SamplingParams(stop=["abac", "q"]))
    updates = [text.append(token_id) for token_id in ids]
    # "aba" may go on to "abac" until the second "b" shows that only its last "ab" can.
    assert [update.delta for update in updates] == ["x", "", "", "", "ab", "", ""]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "abac")


def test_stop_strings_wait_for_min_tokens() -> None:
    assert generate("aXbXc", stop="X", min_tokens=2) == ("aXb", ("stop", "X"), 4)
    assert generate("aXbXc", stop="X", min_tokens=1) == ("a", ("stop", "X"), 2)
    # One that begins before and ends after counts.
    assert generate("aXYb", stop="XY", min_tokens=2) == ("a", ("stop", "XY"), 3)


def test_end_of_sequence_and_stop_tokens() -> None:
    tokenizer = byte_level()
    end, tool = tokenizer.convert_tokens_to_ids("</s>"), tokenizer.convert_tokens_to_ids("<tool>")
    assert generate("ab", eos=[end], extra=[end]) == ("ab", ("stop", None), 3)
    assert generate("ab", eos=[end], extra=[end], skip_special_tokens=False) == ("ab", ("stop", None), 3)
    assert generate("ab", eos=[end], extra=[tool], stop_token_ids=[tool]) == ("ab", ("stop", tool), 3)
    shown = generate("ab", eos=[end], extra=[tool], stop_token_ids=[tool], include_stop_str_in_output=True)
    assert shown == ("ab<tool>", ("stop", tool), 3)
    assert generate("ab", eos=[end], extra=[end], ignore_eos=True) == ("ab", (None, None), 3)
    assert generate("ab", eos=[end], extra=[end], ignore_eos=True, stop_token_ids=[end]) == ("ab", ("stop", end), 3)
    assert generate("ab", eos=[end], extra=[end], stop_token_ids=[tool], detokenize=False) == ("", ("stop", None), 3)


def test_a_stop_token_releases_what_was_held_back() -> None:
    end = byte_level().convert_tokens_to_ids("</s>")
    assert generate("one EN", eos=[end], extra=[end], stop="END") == ("one EN", ("stop", None), 7)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """By definition: the first end, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), end, longest
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    matcher, shown, found = StopStrings(stops, include=include), "", None
    for start, end in itertools.pairwise(edges):
        piece, found = matcher.feed(text[start:end])
        shown += piece
        if found is not None:
            break
        unseen = first_stop(text, stops)
        assert unseen is None or len(shown) <= unseen[0], "part of a stop string was shown"
    else:
        shown += matcher.flush()
    wanted = first_stop(text, stops)
    if wanted is None:
        assert (shown, found) == (text, None)
    else:
        assert (shown, found) == (text[: wanted[1] if include else wanted[0]], wanted[2])


# Real tokenizers


@cache
def real(name: str) -> Any:
    make = {"smollm2": smollm2_dir, "deepseek-v3": deepseek_v3_tokenizer_dir}.get(name, qwen3_tokenizer_dir)
    folder = or_skip(make)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name.endswith("fastokens"):
        compat = pytest.importorskip("fastokens._compat")
        tokenizer._tokenizer = compat._TokenizerShim(tokenizer._tokenizer)
    return tokenizer


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "deepseek-v3", "qwen3-fastokens"])
def test_t5_with_real_tokenizers(name: str) -> None:
    tokenizer = real(name)
    ids = tokenizer.encode(TEXT)
    deltas = stream(tokenizer, ids)
    assert "".join(deltas) == TEXT
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert sum(bool(delta) for delta in deltas) > len(ids) // 2, "it does not stream"

    @settings(max_examples=100, deadline=None)
    @given(output=ids_of(tokenizer), skip=st.booleans())
    def check(output: list[int], skip: bool) -> None:
        assert "".join(stream(tokenizer, output, skip_special_tokens=skip)) == decode(tokenizer, output, skip)

    check()


def test_t5_unfinished_emoji_of_a_real_tokenizer() -> None:
    tokenizer = real("qwen3")
    ids = tokenizer.encode("👩‍👩‍👧")
    for length in range(len(ids) + 1):
        assert "".join(stream(tokenizer, ids[:length])) == decode(tokenizer, ids[:length], True)
