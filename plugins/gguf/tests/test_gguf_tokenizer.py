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


def test_t1_digits_are_split_apart_where_the_file_says_so(
    write_gguf: Callable[..., Any], files_of: Callable[..., Any]
) -> None:
    """SmolLM2, StarCoder and their kin: the reference is their own tokenizer.json's pipeline, Digits then ByteLevel.

    Two spaces before a number are one piece there, and two where the digits stay with the space before them.
    """
    from tokenizers import pre_tokenizers as pre

    def metadata(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("smollm")

    trace = Trace()
    found = _load(write_gguf("qwen2", metadata=metadata), files_of, trace)
    assert trace.warnings() == []
    decided = trace.find("how text is split before BPE")
    assert decided is not None
    assert "(tokenizer.ggml.pre)" in decided.source
    own = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)])
    pieces = found.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in ("x  12", "a 3.14 b", "１２ ٣", "it's  7!\n\n 42", *TEXTS):
        assert pieces(text) == own.pre_tokenize_str(text), text
    assert ("ĠĠ", (1, 3)) in pieces("x  12")


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


def test_t1_an_unknown_split_is_said_wherever_the_tokenizer_is_loaded(
    write_gguf: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By check and explain in their traces, by a running model once in its log."""
    pytest.importorskip("modelbay_runtime")
    pytest.importorskip("modelbay_llama")
    from click.testing import CliRunner

    from modelbay.cli.explain import command as explain
    from modelbay_runtime.check import check_model
    from modelbay_runtime.llm import LLM

    def metadata(writer: Any) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("an-invention")

    monkeypatch.setenv("MODELBAY_CONFIG", "")
    path, said = str(write_gguf(metadata=metadata).path), "the split 'an-invention' is not known here"
    report = check_model(path, {"device": "cpu"})
    assert [decision for decision in report.trace.warnings() if said in str(decision.answer)]
    shown = CliRunner().invoke(explain, [path, "--device", "cpu"])
    assert said in shown.output, shown.output
    caplog.clear()
    with LLM(path, device="cpu", max_num_seqs=2) as llm:
        assert llm.resolution.trace.warnings()
    assert len([record for record in caplog.records if said in record.getMessage()]) == 1
