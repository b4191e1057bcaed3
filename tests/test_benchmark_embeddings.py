"""The embeddings benchmark: engines in turn on the same texts, the first round not counted, other embeddings seen."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelbay.errors import EngineError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("embeddings", BENCHMARKS / "embeddings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "embeddings", module)
    spec.loader.exec_module(module)
    return module


def test_texts_are_of_mixed_length_the_same_for_everybody_and_new_in_each_round(bench: Any) -> None:
    first, again, other = (bench.texts(["a", "b", "c"], 500, seed) for seed in (1, 1, 2))
    assert first == again != other
    lengths = sorted(len(text.split()) for text in first)
    assert lengths[0] <= 3
    assert 10 < lengths[250] < 25
    assert lengths[-1] > 80


def test_engines_take_turns_and_the_first_round_does_not_count(bench: Any) -> None:
    calls: list[tuple[str, str]] = []

    def engine(name: str) -> Any:
        return lambda batch: calls.append((name, batch[0])) or [[1.0, 2.0]] * len(batch)

    engines = {"modelbay": engine("modelbay"), bench.BASELINE: engine(bench.BASELINE)}
    rounds = bench.measure(engines, lambda number: [f"text {number}"], 2)
    assert calls == [(name, f"text {number}") for number in range(3) for name in engines]
    result = bench.summarize(rounds, 1, 1e-5)
    assert result["agrees"]
    assert result["rates"][bench.BASELINE]["ratio"]["median"] == 1
    assert len(result["rates"]["modelbay"]["values"]) == 2


def test_other_embeddings_are_seen(bench: Any) -> None:
    assert bench.farthest([[1.0, 0.0]], [[2.0, 0.0]]) == 0
    assert bench.farthest([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]) == 1
    with pytest.raises(EngineError, match=r"shape \(1, 2\) and \(1, 1\)"):
        bench.farthest([[1.0, 0.0]], [[1.0]])
    assert not bench.summarize([bench.Round({"modelbay": 1.0, bench.BASELINE: 2.0}, 0.1)], 4, 1e-5)["agrees"]
