"""`modelbay embed` and `score`: what is wrong for every line is said of its flag, and of no line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, PoolingParams
from modelbay.cli.main import run
from modelbay.errors import UsageError

Make = Callable[..., tuple[Path, Any]]
Open = Callable[..., LLM]
LONG = "x y " * 60


@pytest.fixture
def refused(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``refused("embed", "BertModel", "--dimensions", "5000", lines="a")``: the one line that it ends in."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(command: str, name: str, *argv: str, lines: str = "a\n", query: str = "query") -> str:
        source = tmp_path / "in.txt"
        source.write_text(lines)
        if not (tmp_path / name).exists():
            make(name, num_labels=1)
        capsys.readouterr()
        given = [query, "--documents"] if command == "score" else ["--input"]
        convert = ["--convert", "embed"] if name == "BertModel" else []
        common = ["--dtype", "float32", "--max-model-len", "64", *convert]
        code = run([command, str(tmp_path / name), *given, str(source), *common, *argv])
        out, err = capsys.readouterr()
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        return err.strip().removeprefix("error: ")

    return call


@pytest.mark.parametrize(
    ("command", "name", "argv", "message"),
    [
        ("embed", "BertModel", ["--dimensions", "5000"], "--dimensions: dimensions=5000, and the embedding has 64"),
        ("embed", "BertModel", ["--dimensions", "0"], "--dimensions: dimensions must be an integer of at least 1"),
        ("embed", "BertModel", ["--prompt-name", "nope"], "--prompt-name: the model has no prompt 'nope'"),
        ("embed", "BertModel", ["--prompt", "a", "--prompt-name", "b"], "--prompt and --prompt-name were both given"),
        ("embed", "BertModel", ["--truncate", "1"], "--truncate: truncate_prompt_tokens=1 leaves no room"),
        ("embed", "BertModel", ["--truncate", "-2"], "--truncate: truncate_prompt_tokens must be a positive"),
        ("score", "BertModel", ["--raw"], "--raw: .*use_activation would have no effect"),
        ("score", "BertModel", ["--truncate", "1"], "--truncate: truncate_prompt_tokens=1 leaves no room"),
        ("score", "BertModel", ["--prompt", "a"], "--prompt: .* are for cross-encoders"),
        ("score", "BertModel", ["--prompt-name", "a"], "--prompt-name: .* are for cross-encoders"),
        (
            "score",
            "BertForSequenceClassification",
            ["--prompt-name", "a"],
            "--prompt-name: the model has no prompt 'a'",
        ),
        ("score", "BertForSequenceClassification", ["--truncate", "1"], "--truncate: .*leaves no room"),
    ],
)
@pytest.mark.parametrize("lines", ["a\n", "a\nb\n", ""])
def test_a_wrong_flag_is_named_whatever_the_lines(
    refused: Any, command: str, name: str, argv: list[str], message: str, lines: str
) -> None:
    from re import match

    assert match(message, refused(command, name, *argv, lines=lines))


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
def test_a_query_that_cannot_be_served_is_named(refused: Any, name: str) -> None:
    assert refused("score", name, lines="a\nb\n", query=LONG).startswith("QUERY: the prompt has ")


def test_the_score_command_puts_a_prompt_before_the_query_and_takes_empty_lines(
    make: Make,
    open_model: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    path, _ = make("BertForSequenceClassification", num_labels=1)
    (tmp_path / "in.txt").write_text("a dog\n\n")
    capsys.readouterr()
    argv = ["score", str(path), "the fox", "--documents", str(tmp_path / "in.txt"), "--prompt", "Find: "]
    assert run([*argv, "--dtype", "float32", "--json"]) == 0
    found = [row["score"] for row in json.loads(capsys.readouterr().out)]
    expected = open_model(path).score("Find: the fox", ["a dog", ""], use_tqdm=False)
    assert found == pytest.approx([output.score for output in expected], abs=1e-6)


@pytest.mark.parametrize("lines", ["{}\n", "{}\nb\n", "a\n{}\n"])
@pytest.mark.parametrize("command", ["embed", "score"])
def test_a_wrong_line_is_named(refused: Any, command: str, lines: str) -> None:
    number = 1 + lines.split("{}", maxsplit=1)[0].count("\n")
    message = refused(command, "BertModel", lines=lines.replace("{}", LONG))
    assert f"in.txt, line {number}: the prompt has " in message


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
def test_parameters_that_are_wrong_for_every_prompt_are_said_of_none(
    make: Make, open_model: Open, prompts: Any
) -> None:
    embeds = open_model(make("BertModel")[0])
    with pytest.raises(UsageError, match=r"^dimensions=5000, and the embedding has 64"):
        embeds.embed(prompts, PoolingParams(dimensions=5000))
    with pytest.raises(UsageError, match=r"^an embedding is returned .*: use_activation would"):
        embeds.score("q", prompts, PoolingParams(use_activation=False))
    with pytest.raises(UsageError, match=r"^hidden states is returned .*: normalize would"):
        embeds.encode(prompts, PoolingParams(normalize=True))
    classifies = open_model(make("BertForSequenceClassification", num_labels=1)[0])
    with pytest.raises(UsageError, match=r"^a classification is returned .*: normalize would"):
        classifies.classify(prompts, PoolingParams(normalize=True))
    with pytest.raises(UsageError, match=r"^a classification is returned .*: normalize would"):
        classifies.score("q", prompts, PoolingParams(normalize=True))
