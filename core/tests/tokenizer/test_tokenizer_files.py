"""Which files a tokenizer is made of: what Transformers' classes name is fetched (S5) and locked."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import transformers

from modelbay.errors import TokenizerError
from modelbay.source import ModelFiles
from modelbay.tokenizer.hf import has_tokenizer, tokenizer_names
from modelbay_testing.hub import LocalHub

CODE = """
from transformers import PythonBackend


class Own(PythonBackend):
    vocab_files_names = {"vocab_file": "own.voc"}

    def __init__(self, vocab_file=None, **kwargs):
        with open(vocab_file, encoding="utf-8") as file:
            self.ids = {line.strip(): number for number, line in enumerate(file)}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.ids.get(token, 0)

    def _convert_id_to_token(self, index):
        return list(self.ids)[index]
"""


def _tokenizer_classes() -> Iterator[type]:
    """Every tokenizer class of the installed Transformers that its own dependencies let import."""
    from transformers import PreTrainedTokenizerBase

    root = Path(transformers.__file__).parent
    for path in sorted(root.rglob("tokenization_*.py")):
        name = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        with suppress(ImportError, NameError):
            found = vars(importlib.import_module(name)).values()
            yield from (cls for cls in found if isinstance(cls, type) and issubclass(cls, PreTrainedTokenizerBase))


def test_every_file_that_a_tokenizer_of_transformers_names_is_fetched_and_locked(tmp_path: Path) -> None:
    """And a class whose vocabulary goes by a name of its own has a tokenizer."""
    classes = {cls for cls in _tokenizer_classes() if isinstance(cls.vocab_files_names, dict)}
    assert len(classes) > 80
    names = {name for cls in classes for name in cls.vocab_files_names.values()} - {None}
    assert {"vocab.json", "bpe.codes"} <= names
    names |= {"source.spm", "target.spm"}  # of Marian, whose class needs a package that need not be installed
    assert names - {*tokenizer_names(files_named(tmp_path, names))} == {"tokenizer_config.json"}, "which is on no disk"
    alone = [cls for cls in classes if (own := {*cls.vocab_files_names.values()} - {"tokenizer_config.json", None})
             and not has_tokenizer(files_named(tmp_path, own))]  # fmt: skip
    assert alone == []


@pytest.mark.parametrize("name", ["tokenizer.4.0.0.json", "tokenizer.model.v3", "tekken_240911.json", "x.tiktoken"])
def test_names_that_transformers_looks_for_besides(tmp_path: Path, name: str) -> None:
    files = files_named(tmp_path, {name, "model.safetensors", "model.safetensors.index.json", "README.md"})
    assert tokenizer_names(files) == (name,)
    assert has_tokenizer(files)


def files_named(root: Path, names: set[str]) -> ModelFiles:
    return ModelFiles(str(root), "local", root, tuple(sorted(names - {"tokenizer_config.json"})))


def test_s5_files_of_less_common_tokenizers_are_downloaded(load, hub: LocalHub) -> None:
    """Marian's; what it makes of them is another question."""
    wanted = {"source.spm": "one", "target.spm": "other", "vocab.json": "{}"}
    wanted["tokenizer_config.json"] = json.dumps({"tokenizer_class": "MarianTokenizer"})
    hub.repo("org/marian").commit({**wanted, "big.bin": b"x", "README.md": "x"})
    with suppress(TokenizerError):
        load("org/marian")
    assert {*hub.downloads()} == {*wanted}


def test_s5_files_that_a_class_of_the_repository_names_are_downloaded(load, hub: LocalHub) -> None:
    hub.repo("org/own").commit(
        {
            "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tok.Own", None]}}),
            "own.voc": "a\nb\n",
            "tok.py": CODE,
            "big.bin": b"x",
        }
    )
    tokenizer, _ = load("org/own", trust_remote_code=True)
    assert tokenizer.convert_tokens_to_ids(["a", "b"]) == [0, 1]
    assert "big.bin" not in hub.downloads()
