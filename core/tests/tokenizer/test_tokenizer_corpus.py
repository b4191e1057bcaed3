"""T1: every mode gives the same ids on thousands of texts: scripts, code, emoji, white space, control characters."""

from __future__ import annotations

import functools
import random
import sysconfig
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay.errors import TokenizerError
from modelbay_testing import assets
from modelbay_testing.python_tokenizer import python_twin

#: Beginnings and ends of blocks, a script each.
SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2AF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF),
    (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x700, 0x74F), (0x780, 0x7BF), (0x900, 0x97F), (0x980, 0x9FF),
    (0xA00, 0xA7F), (0xA80, 0xAFF), (0xB80, 0xBFF), (0xC00, 0xC7F), (0xD00, 0xD7F), (0xE00, 0xE7F), (0xE80, 0xEFF),
    (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x13A0, 0x13FF),
    (0x1780, 0x17FF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x209F), (0x20A0, 0x20CF),
    (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2500, 0x257F), (0x2600, 0x27BF), (0x2800, 0x28FF), (0x3000, 0x303F),
    (0x3040, 0x309F), (0x30A0, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xFB50, 0xFDFF),
    (0xFE00, 0xFE0F), (0xFF00, 0xFFEF), (0x10300, 0x1032F), (0x12000, 0x123FF), (0x13000, 0x1342F), (0x1D400, 0x1D7FF),
    (0x1F1E6, 0x1F1FF), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F900, 0x1F9FF), (0x20000, 0x2A6DF),
    (0xE0020, 0xE007F), (0xF0000, 0xF00FF),
]  # fmt: skip
SPACES = " \t\n\r\v\f\u00a0\u1680\u2003\u2009\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
CONTROLS = "".join(
    map(chr, (*range(32), 127, *range(0x80, 0xA0), 0xAD, 0x200C, 0x200D, 0x200E, 0x202E, 0xFFFC, 0xFFFD))
)
EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷", "🇺🇳", "1️⃣", "🧑🏿‍🚀", "❤️‍🔥", "☺️", "🫱🏼‍🫲🏾", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<｜begin▁of▁sentence｜>",
    "<think>",
    "<unk>",
    "[INST]",
]
PIECES = [
    "don't",
    "I'LL",
    "we've",
    "https://a.b/c?d=e&f=%20",
    "0xDEADBEEF",
    "3.14159e-10",
    "1,234,567.89",
    "$x_1^{2}$",
    "C:\\dir\\file.txt",
]
COUNT = 10_000


def corpus() -> list[str]:
    """At least ``COUNT`` texts, always the same."""
    draw = random.Random(20240607)
    texts = ["", " ", "  ", "\n", "\r\n", "\0", "a", "ß", "ﬁ", "e\u0301", "é", "İ", "ǆ", "\u1e9b\u0323"]
    texts += [chr(code) for begin, end in SCRIPTS for code in range(begin, min(end, begin + 40))]
    texts += [space * length for space in SPACES for length in (1, 2, 3, 7, 16, 40)]
    texts += [f"a{control}b" for control in CONTROLS]
    texts += list(_code_lines(draw, 2000))
    texts += [f"{number}" for number in range(0, 3000, 7)] + [
        f"{draw.random() * 10 ** draw.randrange(9)}" for _ in range(300)
    ]
    while len(texts) < COUNT:
        texts.append(_mixed(draw))
    return texts


def _code_lines(draw: random.Random, count: int) -> Iterator[str]:
    """Pieces of Python's own library: indentation, comments, names in many styles."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for _ in range(count):
        lines = draw.choice(paths).read_text(encoding="utf-8", errors="replace").splitlines()
        begin = draw.randrange(max(len(lines), 1))
        yield "\n".join(lines[begin : begin + draw.randrange(1, 12)])


def _mixed(draw: random.Random) -> str:
    """Words of a few scripts between odd white space, emoji, controls, and texts that look like special tokens."""
    scripts = draw.sample(SCRIPTS, draw.randrange(1, 4))
    parts = []
    for _ in range(draw.randrange(1, 14)):
        match draw.randrange(9):
            case 0:
                parts.append("".join(draw.choices(SPACES, k=draw.randrange(1, 6))))
            case 1:
                parts.append(draw.choice(EMOJI) * draw.randrange(1, 3))
            case 2:
                parts.append(draw.choice(CONTROLS))
            case 3:
                parts.append(draw.choice(PIECES))
            case 4 if draw.random() < 0.3:
                parts.append(draw.choice(SPECIAL))
            case _:
                word = "".join(chr(draw.randint(*draw.choice(scripts))) for _ in range(draw.randrange(1, 12)))
                parts.append(word if draw.random() < 0.8 else unicodedata.normalize("NFD", word))
        parts.append(draw.choice([" ", " ", " ", "", "  ", "\n", ", "]))
    return "".join(parts)


def ids_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.deep
@pytest.mark.real
@pytest.mark.parametrize(
    "asset",
    [assets.smollm2_dir, assets.qwen3_tokenizer_dir, assets.deepseek_v3_tokenizer_dir],
    ids=lambda asset: asset.__name__,
)
def test_t1_ids_are_equal_in_every_mode_on_ten_thousand_texts(load: Any, asset: Any) -> None:
    from transformers import AutoTokenizer

    folder = assets.or_skip(asset)
    texts = corpus()
    assert len(texts) >= COUNT
    assert len(set(texts)) > 0.9 * COUNT
    expected = ids_of(AutoTokenizer.from_pretrained(folder), texts)
    plain = load(folder)[0]
    for mode in ("auto", "hf", "fastokens"):
        tokenizer = load(folder, tokenizer_mode=mode)[0]
        found = ids_of(tokenizer, texts)
        wrong = [text for text, ours, theirs in zip(texts, found, expected, strict=True) if ours != theirs]
        assert not wrong, f"{mode}: {len(wrong)} texts, as {wrong[:3]!r}"
        for text, ids in zip(texts[::20], found[::20], strict=True):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, "alone as in a batch"
            assert tokenizer.decode(ids) == plain.decode(ids)


@pytest.mark.deep
@pytest.mark.real
def test_t1_ids_of_mode_slow_on_ten_thousand_texts(load: Any, tmp_path: Path, capsys: Any) -> None:
    """Those of Transformers' Python class; and of its Rust one, but where the two differ on a character's category."""
    from transformers import AutoTokenizer
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    source = assets.or_skip(assets.minilm_dir)
    folder, texts = python_twin(source, tmp_path / "slow"), corpus()
    tokenizer = load(folder, tokenizer_mode="slow")[0]
    assert not tokenizer.is_fast
    start = time.perf_counter()
    found = ids_of(tokenizer, texts)
    with capsys.disabled():
        rate = sum(len(text.encode()) for text in texts) / (time.perf_counter() - start) / 1e6
        print(f"\nmode slow: {len(texts)} texts at {rate:.2f} MB/s")
    python = BertTokenizerLegacy.from_pretrained(folder)
    assert found == ids_of(python, texts)
    for text, ids in zip(texts[::20], found[::20], strict=True):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, "alone as in a batch"
        assert tokenizer.decode(ids) == python.decode(ids)
    fast = AutoTokenizer.from_pretrained(source)
    rust = ids_of(fast, texts)

    @functools.cache
    def category_differs(char: str) -> bool:
        return ids_of(python, [f"a{char}b"]) != ids_of(fast, [f"a{char}b"])

    differing = [text for text, ours, theirs in zip(texts, found, rust, strict=True) if ours != theirs]
    odd = {char for text in differing for char in text if category_differs(char)}
    old = unicodedata.ucd_3_2_0.category  # what changed since then is known to one of the two and not to the other
    settled = [char for char in odd if not old(char).startswith("C") and old(char) == unicodedata.category(char)]
    assert not settled, f"{len(settled)} characters that both must know: {settled[:5]}"
    plain = [text for text in differing if not odd & set(text)]
    assert not plain, f"{len(plain)} texts without such a character, as {plain[:3]!r}"


@pytest.mark.real
@pytest.mark.parametrize(
    "asset",
    [assets.smollm2_dir, assets.qwen3_tokenizer_dir, assets.deepseek_v3_tokenizer_dir],
    ids=lambda asset: asset.__name__,
)
def test_t1_slow_is_refused_where_there_is_no_python_tokenizer(load: Any, asset: Any) -> None:
    with pytest.raises(TokenizerError, match="has no Python tokenizer"):
        load(assets.or_skip(asset), tokenizer_mode="slow")


@pytest.mark.real
def test_t1_a_byte_that_the_vocabulary_lacks_is_dropped_in_every_mode(load: Any) -> None:
    """fastokens refuses such a text; the ids come from the engine that it replaced."""
    folder = assets.or_skip(assets.smollm2_dir)
    plain, fast = load(folder)[0], load(folder, tokenizer_mode="fastokens")[0]
    texts = ["a\x04b", "plain", "\x16", "\U00040000 \U00080000"]
    assert fast(texts)["input_ids"] == plain(texts)["input_ids"]
    for text in texts:
        assert fast(text)["input_ids"] == fast.encode(text) == plain(text)["input_ids"]
        assert fast(text, truncation=True, max_length=2)["input_ids"] == plain(text)["input_ids"][:2]
