"""T1: which tokenizer, in which mode, from which repository; and that repository code needs trust."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from modelbay import hookimpl
from modelbay.errors import TokenizerError, TrustError, UnknownNameError, UsageError
from modelbay.specs import LoadFormatSpec, TokenizerModeSpec
from modelbay_testing import assets
from modelbay_testing.tiny import tiny_tokenizer

TEXTS = (
    "Hello, world!",
    "  two spaces\n\n\ttab",
    "The year 1984, 3.14159 and 0xDEADBEEF",
    "def f(x):\n    return x ** 2\n",
    "中文分词、日本語、한국어",
    "Ünïcödé e\u0301 👩‍👩‍👧‍👦 🇫🇷",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
)


def loads_anything(files: Any, config: Any, args: Any, trace: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = files.root / (files.entry or files.match("*.box")[0])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.from_box = True
    return tokenizer


def box_plugin() -> ModuleType:
    module = ModuleType("box_plugin")

    def register_tokenizer_modes() -> list[TokenizerModeSpec]:
        return [TokenizerModeSpec(name="box", target=f"{__name__}:loads_anything")]

    def register_load_formats() -> list[LoadFormatSpec]:
        return [LoadFormatSpec(name="box", target="x:y", suffixes=(".box",), tokenizer_mode="box")]

    module.register_tokenizer_modes = hookimpl(register_tokenizer_modes)  # type: ignore[attr-defined]
    module.register_load_formats = hookimpl(register_load_formats)  # type: ignore[attr-defined]
    return module


def test_t1_auto_is_what_autotokenizer_loads(load, tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, trace = load(tiny)
    reference = AutoTokenizer.from_pretrained(tiny)
    assert isinstance(tokenizer, type(reference))
    assert tokenizer.is_fast
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    assert trace.find("mode").answer == "hf"


@pytest.mark.real
@pytest.mark.parametrize(
    "asset", [assets.smollm2_dir, pytest.param(assets.qwen3_tokenizer_dir, marks=pytest.mark.deep)]
)
def test_t1_real_tokenizers_give_autotokenizers_ids(load, asset) -> None:
    from transformers import AutoTokenizer

    folder = assets.or_skip(asset)
    tokenizer, _ = load(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, type(reference))
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == reference.decode(ids)


def test_t1_slow_is_never_the_fast_one(load, tiny: Path) -> None:
    """Case 28."""
    with pytest.raises(TokenizerError, match=r"'slow'.*no Python tokenizer"):
        load(tiny, tokenizer_mode="slow")


def test_t1_slow_loads_a_python_tokenizer(load, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "hello</w>": 1}))
    (tmp_path / "merges.txt").write_text("#version\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    tokenizer, trace = load(tmp_path, tokenizer_mode="slow")
    assert not tokenizer.is_fast
    assert trace.find("class").source == "slow (Python)"
    assert len(tokenizer) == 2


def test_t1_mode_of_a_plugin_and_unknown_mode(load, tiny: Path) -> None:
    (tiny / "x.box").write_text((tiny / "tokenizer.json").read_text())
    assert load(tiny, [box_plugin()], tokenizer_mode="box")[0].from_box
    assert not hasattr(load(tiny, [box_plugin()])[0], "from_box")  # the directory has a tokenizer of its own
    with pytest.raises(UnknownNameError, match="tokenizer_mode 'fast'"):
        load(tiny, tokenizer_mode="fast")


def test_t1_checkpoint_that_carries_its_tokenizer(load, tiny: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "x.box").write_text((tiny / "tokenizer.json").read_text())
    tokenizer, trace = load(alone, [box_plugin()])
    assert tokenizer.from_box
    assert trace.find("mode").answer == "box"
    assert load(alone / "x.box", [box_plugin()])[0].from_box


def test_no_tokenizer_files_says_what_to_do(load, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TokenizerError, match=r"no tokenizer files.*tokenizer=…"):
        load(tmp_path)


def test_truncated_tokenizer_json_is_one_line(load, tiny: Path) -> None:
    text = (tiny / "tokenizer.json").read_text()
    (tiny / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(TokenizerError, match="cannot load the tokenizer") as caught:
        load(tiny)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["TokenizersBackend", "SomeUnknownTokenizer", "LlamaTokenizerFast", None])
def test_t1_tokenizer_class_names(load, tiny: Path, name) -> None:
    """Case 28."""
    values = json.loads((tiny / "tokenizer_config.json").read_text())
    (tiny / "tokenizer_config.json").write_text(json.dumps(values | {"tokenizer_class": name}))
    tokenizer, _ = load(tiny)
    assert tokenizer.decode(tokenizer("the dog")["input_ids"], skip_special_tokens=True) == "the dog"


def test_t1_unknown_model_type_does_not_stop_a_plain_tokenizer(load, tiny: Path) -> None:
    (tiny / "config.json").write_text('{"model_type": "foo", "auto_map": {"AutoConfig": "configuration_foo.Foo"}}')
    values = json.loads((tiny / "tokenizer_config.json").read_text())
    del values["tokenizer_class"]
    (tiny / "tokenizer_config.json").write_text(json.dumps(values))
    assert load(tiny)[0]("the dog")["input_ids"][0] == 1


# -- S2: another repository


def test_s2_another_tokenizer_directory(load, tiny: Path, tmp_path: Path) -> None:
    other = tiny_tokenizer(tmp_path / "other", add_bos=False)
    tokenizer, trace = load(tiny, tokenizer=str(other))
    assert tokenizer("the")["input_ids"][0] != 1
    assert trace.find("repository").answer == str(other)


def test_s2_tokenizer_revision_of_a_local_path_is_an_error(load, tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer_revision 'v2'.*local path"):
        load(tiny, tokenizer_revision="v2")


def test_s2_another_repository_never_gets_the_models_revision(tmp_path, monkeypatch) -> None:
    """Case 12."""
    from modelbay.args import EngineArgs
    from modelbay.source import ModelFiles
    from modelbay.tokenizer import load as module
    from modelbay.trace import Trace

    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(module, "find_repository", lambda reference, **kw: asked.append((reference, kw["revision"])))
    files = ModelFiles("org/model", "hub", tmp_path, (), repo_id="org/model", revision="v1", commit="a" * 40)

    def ask(**kwargs: Any) -> Any:
        return module.tokenizer_files(files, [], EngineArgs.create("org/model", revision="v1", **kwargs), Trace())

    assert ask() is files
    assert ask(tokenizer="org/model") is files
    assert ask(tokenizer_revision="v1") is files
    ask(tokenizer="org/other")
    ask(tokenizer="org/other", tokenizer_revision="v9")
    ask(tokenizer_revision="v2")
    assert asked == [("org/other", None), ("org/other", "v9"), ("org/model", "v2")]


# -- trust


def remote_tokenizer(folder: Path, sentinel: Path) -> None:
    (folder / "tokenization_foo.py").write_text(
        f"from transformers import PreTrainedTokenizerFast\nopen({str(sentinel)!r}, 'w').close()\n"
        "class FooTokenizer(PreTrainedTokenizerFast):\n    remote = True\n"
    )
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values |= {
        "auto_map": {"AutoTokenizer": [None, "tokenization_foo.FooTokenizer"]},
        "tokenizer_class": "FooTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_trust_is_needed_for_a_repository_tokenizer_and_never_asked_for(load, tiny: Path, tmp_path: Path) -> None:
    sentinel = tmp_path / "ran"
    remote_tokenizer(tiny, sentinel)
    (tiny / "config.json").write_text('{"model_type": "foo"}')
    with pytest.raises(TrustError, match="trust") as caught:
        load(tiny)
    assert str(tiny) in str(caught.value)
    assert not sentinel.exists()
    tokenizer, _ = load(tiny, trust_remote_code=True)
    assert sentinel.exists()
    assert tokenizer.remote
    assert tokenizer.decode(tokenizer("the dog")["input_ids"], skip_special_tokens=True) == "the dog"


# -- fastokens


@pytest.mark.real
@pytest.mark.parametrize(
    "asset",
    [
        assets.smollm2_dir,
        assets.qwen3_tokenizer_dir,
        pytest.param(assets.deepseek_v3_tokenizer_dir, marks=pytest.mark.deep),
    ],
)
def test_t1_fastokens_gives_the_same_ids(load, asset) -> None:
    folder = assets.or_skip(asset)
    fast, trace = load(folder, tokenizer_mode="fastokens")
    plain, _ = load(folder)
    assert trace.find("engine").answer == "fastokens"
    assert type(fast._tokenizer) is not type(plain._tokenizer)
    for text in TEXTS:
        ids = plain(text)["input_ids"]
        assert fast(text)["input_ids"] == ids
        assert fast.decode(ids) == plain.decode(ids)
        assert (
            fast(text, max_length=4, truncation=True)["input_ids"]
            == plain(text, max_length=4, truncation=True)["input_ids"]
        )
        assert fast.tokenize(text) == plain.tokenize(text)
        assert (
            fast(text, return_offsets_mapping=True)["offset_mapping"]
            == plain(text, return_offsets_mapping=True)["offset_mapping"]
        )
    assert fast("a b", "c d")["input_ids"] == plain("a b", "c d")["input_ids"]
    assert fast.get_vocab() == plain.get_vocab()
    assert fast.decode([len(plain) + 5]) == plain.decode([len(plain) + 5]) == ""  # T3: an id it does not know


@pytest.fixture
def all_bytes(tmp_path: Path) -> Path:
    """A tiny BPE with a token for every byte, as fastokens needs it."""
    return tiny_tokenizer(tmp_path / "bytes", vocab_size=400)


@pytest.mark.parametrize("value", ["1", "true", "True", "YES", "on"])
def test_t1_environment_switches_bpe(load, all_bytes, monkeypatch, value) -> None:
    monkeypatch.setenv("MODELBAY_USE_FASTOKENS", value)
    tokenizer, trace = load(all_bytes)
    assert type(tokenizer._tokenizer).__module__.startswith("fastokens")
    assert trace.find("engine").source == "MODELBAY_USE_FASTOKENS"


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_t1_environment_false_leaves_it(load, tiny, monkeypatch, value) -> None:
    monkeypatch.setenv("MODELBAY_USE_FASTOKENS", value)
    assert type(load(tiny)[0]._tokenizer).__module__ == "tokenizers"


def wordpiece(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "dog": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_t1_environment_leaves_others_alone_and_says_so(load, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MODELBAY_USE_FASTOKENS", "1")
    tokenizer, trace = load(wordpiece(tmp_path / "wp"))
    assert tokenizer("the dog")["input_ids"] == [1, 2]
    decision = trace.find("engine")
    assert (decision.answer, decision.level) == ("unchanged", "warning")
    assert "byte-level BPE" in decision.source


def test_t1_explicit_fastokens_on_an_unsupported_tokenizer_is_an_error(load, tmp_path) -> None:
    with pytest.raises(TokenizerError, match=r"'fastokens' was asked for.*byte-level BPE"):
        load(wordpiece(tmp_path / "wp"), tokenizer_mode="fastokens")


def test_t1_absent_package(load, tiny, monkeypatch) -> None:
    """Case 28."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.setitem(sys.modules, "fastokens._compat", None)
    with pytest.raises(TokenizerError, match="pip install"):
        load(tiny, tokenizer_mode="fastokens")


def test_t1_fastokens_changes_this_instance_only(load, all_bytes) -> None:
    load(all_bytes, tokenizer_mode="fastokens")
    assert type(load(all_bytes)[0]._tokenizer).__module__ == "tokenizers"


def test_t1_fastokens_that_would_fail_on_some_text_is_refused_at_load(load, tiny) -> None:
    with pytest.raises(TokenizerError, match="cannot encode every text"):
        load(tiny, tokenizer_mode="fastokens")
