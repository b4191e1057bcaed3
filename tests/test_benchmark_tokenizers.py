"""The tokenizer benchmark: modes in turn on the same texts, the first round not counted, other ids refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer

from modelbay_testing.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench() -> Any:
    spec = importlib.util.spec_from_file_location("tokenizer_modes", ROOT / "benchmarks" / "tokenizer_modes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_measures(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_tokenizer(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["x", "--tokenizer", folder, "--modes", "auto", "--rounds", "2", "--texts", "5", "--json"]
    )
    bench.main()
    result = json.loads(capsys.readouterr().out)
    assert (result["texts"], result["rounds"], list(result["modes"])) == (5, 2, ["hf", "auto"])
    assert result["modes"]["hf"]["ratio"] == 1
    low, high = result["modes"]["auto"]["range"]
    assert low <= result["modes"]["auto"]["ratio"] <= high


def test_slow_is_the_python_class_for_the_same_vocabulary(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *map(chr, range(33, 127))]
    words += [f"##{word}" for word in words[5:]]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    seen = []
    original = bench.load
    monkeypatch.setattr(bench, "load", lambda folder, mode: seen.append(original(folder, mode)) or seen[-1])
    argv = ["x", "--tokenizer", str(tmp_path), "--modes", "hf,slow", "--rounds", "1", "--texts", "3", "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    bench.main()
    assert [tokenizer.is_fast for tokenizer in seen] == [True, False]
    assert list(json.loads(capsys.readouterr().out)["modes"]) == ["hf", "slow"]


def test_modes_take_turns_and_the_first_round_does_not_count(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def load(folder: str, mode: str) -> Any:
        return lambda text: calls.append(mode) or {"input_ids": [len(text)]}

    monkeypatch.setattr(bench, "load", load)
    result = bench.measure({"hf": "x", "fastokens": "x"}, 3, ["a", "b"])
    assert calls == ["hf"] * 2 + (["hf"] * 2 + ["fastokens"] * 2) * 4
    assert set(result["modes"]) == {"hf", "fastokens"}


def test_other_ids_end_the_run(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load", lambda folder, mode: lambda text: {"input_ids": [mode]})
    with pytest.raises(SystemExit, match="mode fastokens gives other ids"):
        bench.measure({"hf": "x", "fastokens": "x"}, 1, ["a"])
