"""Structured outputs from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest

from modelbay.cli.main import run
from modelbay_testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
Run = Callable[..., tuple[int, str, str]]
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def cli(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``code, stdout, stderr = cli("--flag", …)`` of ``modelbay generate`` with one prompt."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(*argv: str) -> tuple[int, str, str]:
        code = run(["generate", str(model), "--prompt", "The quick", "--seed", "3", *argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_schema_as_text_or_file(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    code, from_file, _ = cli("--json-schema", str(path))
    assert code == 0
    jsonschema.validate(json.loads(from_file), SCHEMA)
    assert cli("--json-schema", json.dumps(SCHEMA))[:2] == (0, from_file)


def test_expression_and_choices(cli: Run) -> None:
    code, out, _ = cli("--regex", "[ab]{3}c")
    assert code == 0
    assert len(out) == 5
    assert out.endswith("c\n")
    code, out, _ = cli("--choice", "left", "--choice", "right", "--n", "2")
    assert code == 0
    assert set(out.splitlines()[1::2]) <= {"left", "right"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--regex", "("], "the regular expression cannot be used"),
        (["--regex", "a", "--choice", "b"], "exactly one of"),
        (["--json-schema", "no-such-file.json"], "neither a JSON object nor a file"),
        (["--json-schema", '{"not": {}}'], "not"),
        (["--json-schema", "{"], "not JSON"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(cli: Run, flags: list[str], reason: str) -> None:
    code, out, err = cli(*flags)
    assert (code, out) == (2, "")
    assert reason in err.splitlines()[-1]


@pytest.mark.parametrize("more", [[], ["--json"], ["--n", "2"]])
def test_a_conflict_shows_what_there_is_and_exits_with_1(cli: Run, more: list[str]) -> None:
    code, out, err = cli("--choice", "yes", "--min-tokens", "40", *more)
    assert code == 1
    assert "yes" in out
    assert "min_tokens" in err.splitlines()[-1]
