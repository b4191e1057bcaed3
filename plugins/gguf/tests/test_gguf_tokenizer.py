"""The tokenizer inside the file gives the ids that Transformers gives (T1)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from modelbay.errors import TokenizerError
from modelbay.trace import Trace
from modelbay_gguf.tokenizer import load

TEXTS = ("the other land", "  on\n\nthen, 12 + 34!", "<s>hello</s>", "", "é – 한국어 🙂")


def _load(tiny: Any, files_of: Callable[..., Any], trace: Trace | None = None) -> Any:
    config = SimpleNamespace(model_type=tiny.model.config.model_type)
    return load(files_of(tiny.path), config, None, Trace() if trace is None else trace)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3", "starcoder2"])
def test_t1_type_ids_and_template_are_those_of_transformers(
    arch: str, write_gguf: Callable[..., Any], files_of: Callable[..., Any]
) -> None:
    from transformers import AutoTokenizer

    tiny = write_gguf(arch)
    found = _load(tiny, files_of)
    expected = AutoTokenizer.from_pretrained(tiny.path.parent, gguf_file=tiny.path.name)
    assert type(found) is type(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.chat_template == expected.chat_template
    for text in TEXTS:
        ids = found(text).input_ids
        assert ids == expected(text).input_ids, text
        assert found.decode(ids) == expected.decode(ids)


def test_t2_it_can_be_pickled(write_gguf: Callable[..., Any], files_of: Callable[..., Any]) -> None:
    found = _load(write_gguf(), files_of)
    assert pickle.loads(pickle.dumps(found))(TEXTS[1]).input_ids == found(TEXTS[1]).input_ids


def test_t1_a_split_that_transformers_does_not_know_is_a_warning(
    write_gguf: Callable[..., Any], files_of: Callable[..., Any]
) -> None:
    def metadata(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("an-invention")

    trace = Trace()
    _load(write_gguf(metadata=metadata), files_of, trace)
    assert "an-invention" in trace.warnings()[0].answer
    known = Trace()
    _load(write_gguf(name="known.gguf"), files_of, known)
    assert known.warnings() == []


def test_a_file_without_a_vocabulary_says_what_to_do(
    write_gguf: Callable[..., Any], files_of: Callable[..., Any]
) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\. Name one"):
        _load(write_gguf(vocabulary=False), files_of)


def test_a_vocabulary_that_transformers_cannot_build_is_named(
    write_gguf: Callable[..., Any], files_of: Callable[..., Any]
) -> None:
    def metadata(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.model")
        writer.add_tokenizer_model("rwkv")

    with pytest.raises(TokenizerError, match="'rwkv'"):
        _load(write_gguf(metadata=metadata), files_of)
