"""``modelbay embed`` on files of any size: what stands around the model."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from modelbay.cli.main import run


class Vectors:
    """Stands for a model, so that what is measured is what reads and writes around it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.largest = 0

    def __enter__(self) -> Vectors:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def embed(self, prompts: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [SimpleNamespace(embedding=[0.5] * 64) for _ in prompts]


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelbay_runtime.llm.LLM", Vectors)
    monkeypatch.setattr("modelbay_runtime.pooling.calls.check_embeds", lambda *args, **given: None)


@pytest.mark.parametrize("output", ["out.npy", "out.jsonl"])
def test_the_embed_command_holds_no_more_of_a_file_that_is_ten_times_as_long(output: str, tmp_path: Path) -> None:
    peaks = []
    for lines in (3_000, 3_000, 30_000):  # the first run imports
        (tmp_path / "in.txt").write_text("a line of some words\n" * lines, encoding="utf-8")
        tracemalloc.start()
        try:
            assert run(["embed", "m", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / output)]) == 0
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]
    if output == "out.npy":
        assert np.load(tmp_path / output, mmap_mode="r").shape == (30_000, 64)
    else:
        assert sum(1 for _ in (tmp_path / output).open()) == 30_000


def test_the_embed_command_shows_how_much_of_the_file_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    def bar(total: int, what: str, wanted: bool = True) -> Any:
        bars.append(SimpleNamespace(total=total, wanted=wanted, done=[]))
        made = MagicMock()
        made.__enter__.return_value.update = bars[-1].done.append
        return made

    monkeypatch.setattr("modelbay_runtime.progress.progress_bar", bar)
    (tmp_path / "in.txt").write_text("some words\n" * 2_500, encoding="utf-8")
    assert run(["embed", "m", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]) == 0
    [shown] = bars
    assert shown.wanted
    assert len(shown.done) > 1  # window by window
    assert sum(shown.done) == shown.total == (tmp_path / "in.txt").stat().st_size
