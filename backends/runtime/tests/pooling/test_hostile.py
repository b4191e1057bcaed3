"""Input that no honest caller brings to pooling models: refused by name, at its own line, never another's vector."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelbay import LLM, PoolingParams
from modelbay.cli.main import run
from modelbay.errors import ConfigError, UsageError

Make = Callable[..., tuple[Path, Any]]
Open = Callable[..., LLM]
SENTENCE_MODULES = "sentence_transformers.models."


@pytest.fixture
def refused(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The one line that a command over these lines ends in."""
    monkeypatch.setenv("MODELBAY_CONFIG", "")

    def call(command: str, lines: str, *argv: str, code: int = 2) -> str:
        source = tmp_path / "in.jsonl"
        source.write_text(lines)
        given = ["query", "--documents"] if command == "score" else ["--input"]
        common = ["--dtype", "float32", "--max-model-len", "64", "--convert", "embed"]
        model = tmp_path / "BertModel"
        if not model.exists():
            make("BertModel")
            capsys.readouterr()
        found = run([command, str(model), *given, str(source), *common, *argv])
        out, err = capsys.readouterr()
        shown = err.splitlines()  # no word of a cache: an encoder has none
        assert (found, out, len(shown)) == (code, "", 1), err
        assert "internal" not in shown[0]
        return shown[0].removeprefix("error: ")

    return call


@pytest.mark.parametrize("command", ["embed", "score"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"text": 5}', "text is a text, got 5"),
        ('{"text": [1, 2]}', r"text is a text, got \[1, 2\]"),
        ('{"prompt_token_ids": "abc"}', "prompt_token_ids is a list of token ids, got 'abc'"),
        ('{"text": "a", "id": NaN}', "not JSON: NaN is not of JSON"),
        (json.dumps("x y " * 60), "the prompt has .* tokens; with max_model_len=64"),
    ],
)
def test_a_bad_line_is_named(refused: Any, command: str, bad: str, message: str) -> None:
    """Numbers of several lines are not one prompt's token ids; equal texts are one prompt, and lines are counted."""
    from re import match

    assert match(rf".*in\.jsonl, line 4: {message}", refused(command, f'"ok"\n"ok"\n"also"\n{bad}\n"ok"\n'))


def test_lines_of_numbers_are_not_one_prompt(refused: Any) -> None:
    assert "line 1: text is a text" in refused("embed", '{"text": 5}\n{"text": 6}\n')


def test_an_output_that_is_a_directory_is_seen_before_the_work(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "out.npy").mkdir()
    message = refused("embed", '"a"\n', "--output", str(tmp_path / "out.npy"))
    assert message.endswith("out.npy: it is a directory.")
    assert not (tmp_path / "out.npy.partial").exists()


@pytest.mark.parametrize(
    ("query", "documents"), [(None, "d"), ("q", None), (5, "d"), ({"prompt": "q"}, "d"), ("q", {"d": 1}), (b"q", "d")]
)
def test_what_is_no_text_to_score(make: Make, open_model: Open, query: Any, documents: Any) -> None:
    """The keys of a mapping are not what was meant."""
    llm = open_model(make("BertModel")[0])
    with pytest.raises(UsageError, match="queries and documents are texts, or lists of them, got"):
        llm.score(query, documents)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": "x.png"}}, "images and audio are not taken here"),
        ({"prompt": "a", "prompt_embeds": torch.zeros(1, 64)}, "has 'prompt_embeds', which is not served"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is a list of token ids, got a string"),
    ],
)
@pytest.mark.parametrize("params", [PoolingParams(), PoolingParams(truncate_prompt_tokens=-1)])
def test_nothing_of_a_prompt_is_dropped(make: Make, open_model: Open, item: Any, message: str, params: Any) -> None:
    llm = open_model(make("BertModel")[0])
    with pytest.raises(UsageError, match=message):
        llm.embed(item, params)


@pytest.mark.parametrize("given", [{"prompt": 5}, {"prompt_name": 5}, {"prompt_name": ["query"]}])
def test_what_is_no_prompt_before_a_text(make: Make, open_model: Open, given: Any) -> None:
    llm = open_model(make("BertModel")[0])
    with pytest.raises(UsageError, match="is a string, got"):
        llm.embed("a", **given)


def with_layer_norm(path: Path, size: int, pooling: dict[str, Any]) -> Path:
    names = ["Transformer", "Pooling", "LayerNorm"]
    folders = ["", "1_Pooling", "2_LayerNorm"]
    entries = [{"type": SENTENCE_MODULES + name, "path": folder} for name, folder in zip(names, folders, strict=True)]
    for folder, config in (("1_Pooling", pooling), ("2_LayerNorm", {"dimension": size})):
        (path / folder).mkdir(exist_ok=True)
        (path / folder / "config.json").write_text(json.dumps(config))
    (path / "modules.json").write_text(json.dumps(entries))
    save_file(
        {"norm.weight": torch.ones(size), "norm.bias": torch.zeros(size)}, path / folders[2] / "model.safetensors"
    )
    return path


def test_a_stage_of_another_size_is_seen_before_weights_are_read(make: Make, open_model: Open) -> None:
    path = with_layer_norm(make("BertModel")[0], 32, {"pooling_mode": "mean"})
    with pytest.raises(ConfigError, match="is for vectors of 32 numbers, and those of mean have 64 there"):
        open_model(path)


def test_a_request_whose_vectors_do_not_fit_the_stages_is_refused_alone(make: Make, open_model: Open) -> None:
    """The stages are for two modes, and a request names one: its neighbours have their vectors."""
    llm = open_model(with_layer_norm(make("BertModel")[0], 128, {"pooling_mode": ["mean", "max"]}))
    [alone] = llm.embed(["a fox"], use_tqdm=False)
    with pytest.raises(
        UsageError, match=r"prompt 1: pooling_type=cls does not fit this model: 2_LayerNorm/config.json"
    ):
        llm.embed(["a fox", "b"], [PoolingParams(), PoolingParams(pooling_type="cls")], use_tqdm=False)
    assert llm.embed(["a fox"], use_tqdm=False)[0].embedding == alone.embedding
    assert not llm.engine.requests
