"""The matrix of Transformers' architectures: its data has not fallen behind, its page is made of it, and a sample (all,
in the deep run) still does what the data says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelbay_testing.matrix.__main__ import DATA, PAGE, first_party
from modelbay_testing.matrix.attempt import attempt
from modelbay_testing.matrix.cases import all_cases
from modelbay_testing.matrix.data import AT_LEAST, ON_RANKS_AT_LEAST, counts, render
from modelbay_testing.matrix.ranks import MATCHES, MESHES, WRONG, attempt_ranks, matching_cases, run_on_ranks
from modelbay_testing.matrix.run import run_cases

SAMPLE = (
    "generate/gpt2", "generate/gpt_neox", "generate/gemma2", "generate/granite", "generate/cohere", "generate/olmo2",
    "generate/gpt_oss", "generate/mixtral", "generate/qwen3_moe", "generate/deepseek_v3", "generate/deepseek_v32",
    "generate/llama4_text", "generate/gemma4_text", "generate/bart", "generate/jetmoe",
    "generate/mamba", "generate/zaya", "generate/falcon", "generate/diffllama",
    "classify/bert", "classify/albert", "classify/xlm-roberta", "classify/eurobert", "classify/qwen2",
    "classify/gemma2", "classify/gpt2", "classify/deberta",
    "generate/gemma4_unified", "image-text/llava", "image-text/gemma3", "image-text/qwen3_vl", "image-text/paligemma",
    "image-text/blip-2", "image-text/mllama", "audio-text/voxtral", "audio-text/qwen2_audio",
    "embed/bert", "embed/albert", "embed/modernbert", "embed/xlm-roberta", "embed/qwen2", "embed/mobilebert",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / DATA).read_text(encoding="utf-8"))
    return loaded


def test_a3_enough_architectures_match_and_none_differs_or_fails(data: dict[str, Any]) -> None:
    found = counts(data)
    for task, least in AT_LEAST.items():
        assert found[task, "matches"] >= least
        assert (task, "differs") not in found
        assert (task, "fails") not in found
    assert all(model["reason"] for model in data["models"] if model["outcome"] == "refused")


def test_every_architecture_of_the_installed_transformers_has_its_line(data: dict[str, Any]) -> None:
    from importlib.metadata import version

    if version("transformers") != data["transformers"]:
        pytest.skip(f"the data is of transformers {data['transformers']}: run make matrix")
    listed = [f"{model['task']}/{model['model_type']}" for model in data["models"]]
    assert sorted(listed) == sorted(case.name for case in all_cases())


def test_the_page_is_what_the_data_gives(root: Path, data: dict[str, Any]) -> None:
    assert (root / PAGE).read_text(encoding="utf-8") == render(data, first_party()), "run make matrix"


@pytest.mark.parametrize("name", SAMPLE)
def test_x1_a_sample_does_what_the_data_says(name: str, data: dict[str, Any], tmp_path: Path, one_thread: None) -> None:
    said = _said(data, name)
    case = next(case for case in all_cases() if case.name == name)
    outcome = attempt(case, tmp_path)
    assert (outcome.outcome, outcome.reason) == (said["outcome"], said.get("reason", ""))


@pytest.mark.deep
def test_nothing_that_matched_is_lost(data: dict[str, Any]) -> None:
    outcomes = {f"{outcome.task}/{outcome.model_type}": outcome for outcome in run_cases(all_cases())}
    lost = {
        name: (said["outcome"], outcomes[name].outcome, outcomes[name].reason)
        for said in data["models"]
        if outcomes[name := f"{said['task']}/{said['model_type']}"].outcome != said["outcome"]
    }
    assert not lost


RANK_SAMPLE = (
    "generate/gemma2", "generate/gpt_neox", "generate/deepseek_v3", "generate/gpt_oss", "generate/bart",
    "generate/gpt2", "embed/modernbert",
)  # fmt: skip


def test_x5_x6_what_matches_was_tried_on_ranks_and_nothing_differs(data: dict[str, Any]) -> None:
    for case in matching_cases(data, all_cases()):
        said = _said(data, case.name)
        assert set(MESHES) <= said.keys(), f"{case.name}: run make matrix-ranks"
        assert not any(said[field].startswith(WRONG) for field in MESHES), said
    shares = [model for model in data["models"] if model.get("tp") == MATCHES]
    stages = [model for model in data["models"] if model.get("pp") == MATCHES]
    assert min(len(shares), len(stages)) >= ON_RANKS_AT_LEAST


@pytest.mark.parametrize("name", RANK_SAMPLE)
def test_x5_x6_a_sample_on_ranks_does_what_the_data_says(
    name: str, data: dict[str, Any], tmp_path: Path, one_thread: None
) -> None:
    case = next(case for case in all_cases() if case.name == name)
    said = _said(data, name)
    assert attempt_ranks(case, tmp_path) == {field: said[field] for field in MESHES}


@pytest.mark.deep
def test_x5_x6_all_on_ranks_does_what_the_data_says(data: dict[str, Any]) -> None:
    found = dict(run_on_ranks(matching_cases(data, all_cases())))
    changed = {
        case.name: answers for case, answers in found.items() if not answers.items() <= _said(data, case.name).items()
    }
    assert not changed


def _said(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(model for model in data["models"] if f"{model['task']}/{model['model_type']}" == name)
