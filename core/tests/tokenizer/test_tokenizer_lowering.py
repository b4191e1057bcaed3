"""The copy of a tokenizer that lower-cases: ids as sentence-transformers has them with ``do_lower_case``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from modelbay.tokenizer import cached, extra_bos, template_text
from modelbay_testing import assets

TEXTS = [
    "The Quick BROWN fox", "a <pad> B </s> C", "A <S> b </S>", "ONE [SEP] TWO [sep]", "İstanbul ẞ", "ΑΣ ΟΔΟΣ", "",
    "É e\u0301 Å",
]  # fmt: skip


def theirs(tokenizer: Any) -> Any:
    """What the library does to a tokenizer: a normaliser before its own."""
    from tokenizers.normalizers import Lowercase, Sequence

    own = tokenizer.backend_tokenizer.normalizer
    tokenizer.backend_tokenizer.normalizer = Sequence([Lowercase(), *([] if own is None else [own])])
    return tokenizer


@pytest.mark.parametrize("name", ["tiny", "qwen3", "minilm"])
def test_t2_the_ids_of_lower_cased_texts(name: str, tiny: Path) -> None:
    from transformers import AutoTokenizer

    folder = {"tiny": lambda: tiny, "qwen3": assets.qwen3_tokenizer_dir, "minilm": assets.minilm_dir}[name]()
    ours, reference, plain = (AutoTokenizer.from_pretrained(folder) for _ in range(3))
    for tokenizer in (ours, reference, plain):
        tokenizer.add_special_tokens({"additional_special_tokens": ["[SEP]"]})
    ours, reference = cached(ours), theirs(reference)
    for text in TEXTS:
        assert ours.lowering(text)["input_ids"] == reference(text)["input_ids"], text
        assert ours.lowering([text], ["A B"])["input_ids"] == reference([text], ["A B"])["input_ids"]
        assert ours(text)["input_ids"] == plain(text)["input_ids"], "the tokenizer itself stays as it is"
    assert ours.lowering is ours.lowering
    assert ours.lowering.lowering("ABC")["input_ids"] == ours.lowering("abc")["input_ids"]
    copy = pickle.loads(pickle.dumps(ours.lowering))
    assert copy("ABC")["input_ids"] == ours.lowering("abc")["input_ids"]


def test_t1_the_copy_of_a_tokenizer_on_another_engine_gives_the_same_ids() -> None:
    pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")
    from transformers import AutoTokenizer

    from modelbay.tokenizer.fastokens import switch

    ours = cached(AutoTokenizer.from_pretrained(assets.qwen3_tokenizer_dir()))
    reference = theirs(AutoTokenizer.from_pretrained(assets.qwen3_tokenizer_dir()))
    assert switch(ours) is None
    for text in TEXTS:
        assert ours.lowering(text)["input_ids"] == reference(text)["input_ids"]


def test_t4_how_many_bos_are_too_many(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = cached(AutoTokenizer.from_pretrained(tiny))
    for ids, extra in (([], 0), ([1], 0), ([1, 5, 1, 1], 0), ([1, 1], 1), ([1, 1, 1, 5], 2)):
        assert extra_bos(tokenizer, ids) == extra


def test_t4_the_text_of_the_template_that_will_be_used(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert template_text(tokenizer) == tokenizer.chat_template
    assert template_text(tokenizer, "{{ messages }}") == "{{ messages }}"
    (tmp_path / "own").write_text("{{ loud }}")
    assert template_text(tokenizer, str(tmp_path / "own")) == "{{ loud }}"
    tokenizer.chat_template = {"default": "{{ one }}", "tool_use": "{{ two }}"}
    assert template_text(tokenizer, "tool_use") == "{{ two }}"
    assert template_text(tokenizer) == "{{ one }}\n{{ two }}"
