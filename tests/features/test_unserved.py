"""Arguments of vLLM that mean nothing here are refused with the reason, and none of them is served after all."""

from __future__ import annotations

import dataclasses

import pytest

from modelbay import SamplingParams
from modelbay.args import EngineArgs
from modelbay.cli.main import run
from modelbay.errors import UsageError
from modelbay.unserved import ENGINE_ARGUMENTS, SAMPLING_PARAMETERS


@pytest.mark.parametrize("name", sorted(ENGINE_ARGUMENTS))
def test_an_engine_argument_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UsageError, match=f"^engine argument '{name}': ") as caught:
        EngineArgs.create("model", **{name: 1})
    assert str(caught.value).endswith(ENGINE_ARGUMENTS[name][1] or ENGINE_ARGUMENTS[name][0])


@pytest.mark.parametrize("name", sorted(SAMPLING_PARAMETERS))
def test_a_sampling_parameter_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UsageError, match=f"^parameter of SamplingParams '{name}': "):
        SamplingParams(**{name: 1})


def test_none_of_them_is_served() -> None:
    assert not ENGINE_ARGUMENTS.keys() & {entry.name for entry in dataclasses.fields(EngineArgs)}
    assert not SAMPLING_PARAMETERS.keys() & {entry.name for entry in dataclasses.fields(SamplingParams)}


def test_an_option_of_the_command_line_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "model", "--enable-lora", "--prompt", "a"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: option --enable-lora: LoRA adapters are not served by this version. "
        "Merge the adapter into the weights (PEFT's merge_and_unload)."
    ]
