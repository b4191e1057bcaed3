"""`modelbay check` and how a model is divided: it lists what the backend divides, and a refusal is an argument's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay import resolve
from modelbay.cli.main import run
from modelbay_runtime.check import check_model
from modelbay_runtime.parallel.sizes import tensor_parallel_sizes
from modelbay_runtime.slicing import TRIED
from modelbay_testing.tiny import tiny_checkpoint

ARGUMENTS: dict[str, Any] = {"device": "cpu", "load_format": "dummy"}
#: Model types that are divided, that are not, and that are by some of the numbers which the config allows.
TYPES = ("bitnet", "gpt2", "gpt_oss", "jetmoe", "llama", "qwen3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a tiny model of that type, made at the first call."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    values = {"gpt_oss": {"sliding_window": 16, "rope_parameters": plain}}
    return functools.cache(
        lambda name: str(tiny_checkpoint(tmp_path_factory.mktemp(name), name, **values.get(name, {})))
    )


def explained(model: str, capsys: pytest.CaptureFixture[str], **arguments: Any) -> bool:
    """Whether `explain` builds it so, on its way from the same arguments."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**ARGUMENTS, **arguments}.items()]
    code = run(["explain", model, *options])
    capsys.readouterr()
    return code == 0


@pytest.mark.parametrize("name", TYPES)
def test_x5_the_sizes_that_check_lists_are_those_that_explain_divides(
    checkpoint: Callable[[str], str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    report = check_model(checkpoint(name), ARGUMENTS)
    assert report.runs, report.missing
    arithmetic = [each.size for each in tensor_parallel_sizes(resolve(checkpoint(name), **ARGUMENTS).config)]
    assert max(arithmetic) <= TRIED
    divided = [size for size in arithmetic if explained(checkpoint(name), capsys, tensor_parallel_size=size)]
    assert [size.size for size in report.tensor_parallel_sizes] == divided
    assert (divided == arithmetic) is (name in ("gpt_oss", "llama", "qwen3")), "some of each kind"


def test_sizes_beyond_those_that_are_tried_are_said_to_be_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_checkpoint(tmp_path, "llama", num_attention_heads=32, num_key_value_heads=8, head_dim=4))
    sizes = [size.size for size in check_model(model, ARGUMENTS).tensor_parallel_sizes]
    assert sizes[:4] == [1, 2, 4, 8]
    assert sizes[4:]
    assert run(["check", model, "--device", "cpu"]) == 0
    assert f"; by the config's numbers also {sizes[4]} (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("gpt2", {"tensor_parallel_size": 2}, "GPT2Model has no tensor parallel plan"),
        ("gpt2", {"tensor_parallel_size": 3}, "num_attention_heads 4 is not divisible by 3"),
        ("gpt_oss", {"data_parallel_size": 2, "enable_expert_parallel": True}, "the experts of GptOssModel cannot"),
        ("llama", {"pipeline_parallel_size": 9}, "pipeline_parallel_size = 9: there are 2 layers"),
    ],
)
def test_a_division_that_is_refused_is_the_arguments_fault_and_no_plugin_is_missing(
    checkpoint: Callable[[str], str], name: str, asked: dict[str, Any], said: str
) -> None:
    report = check_model(checkpoint(name), {**ARGUMENTS, **asked})
    assert [missing.kind for missing in report.missing] == ["argument"]
    assert said in report.missing[0].message
    assert report.exit_code == 2
    assert report.tensor_parallel_sizes == check_model(checkpoint(name), ARGUMENTS).tensor_parallel_sizes


def test_a_model_that_cannot_be_built_at_all_is_not_the_divisions_fault(checkpoint: Callable[[str], str]) -> None:
    overrides = {"hf_overrides": {"hidden_act": "nonsense"}, "tensor_parallel_size": 2}
    report = check_model(checkpoint("llama"), {**ARGUMENTS, **overrides})
    assert ([missing.kind for missing in report.missing], report.exit_code) == (["plugin"], 1)
    assert report.tensor_parallel_sizes == []
