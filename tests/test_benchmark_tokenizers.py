"""The tokenizer benchmark: modes in turn on the same texts, the first round not counted, other ids refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_modes_take_turns_and_the_first_round_does_not_count(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def load(folder: str, mode: str) -> Any:
        return lambda text: calls.append(mode) or {"input_ids": [len(text)]}

    monkeypatch.setattr(bench, "load", load)
    result = bench.measure("x", ["fastokens"], 3, ["a", "b"])
    assert calls == ["hf"] * 2 + (["hf"] * 2 + ["fastokens"] * 2) * 4
    assert set(result["modes"]) == {"hf", "fastokens"}


def test_other_ids_end_the_run(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "load", lambda folder, mode: lambda text: {"input_ids": [mode]})
    with pytest.raises(SystemExit, match="mode fastokens gives other ids"):
        bench.measure("x", ["fastokens"], 1, ["a"])
