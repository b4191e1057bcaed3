"""A1: `model_impl` as an argument, as a flag, and for one architecture in a config file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from modelbay import LLM, SamplingParams, resolve
from modelbay.cli.main import run
from modelbay.errors import ArchitectureError, ModelbayError
from modelbay_testing.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    """No plugin registers this one."""
    return str(tiny_checkpoint(tmp_path_factory.mktemp("neox"), "gpt_neox"))


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setenv("MODELBAY_CONFIG", str(path))
        return path

    return write


def kind_of(model: str, **options: str) -> tuple[str, list[int]]:
    """The type of the module, by `apply_model`, and what it generates."""
    with LLM(model, device="cpu", dtype="float32", **options) as llm:
        [kind] = llm.apply_model(lambda module: type(module).__name__)
        return kind, llm.generate("The fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a1_the_argument(llama: str, neox: str) -> None:
    """The same text whichever runs it; the type's name says which does (A4)."""
    native, expected = kind_of(llama)
    assert not native.startswith("Transformers")
    assert kind_of(llama, model_impl="native") == (native, expected)
    assert kind_of(llama, model_impl="transformers") == ("TransformersForCausalLM", expected)
    assert kind_of(neox)[0] == "TransformersForCausalLM"


def test_a1_native_never_falls_back(neox: str) -> None:
    with pytest.raises(
        ModelbayError, match=r"model_impl=native cannot build 'GPTNeoXForCausalLM'.*no installed plugin"
    ):
        resolve(neox, model_impl="native")


def test_a1_a_config_file_decides_for_one_architecture(
    llama: str, neox: str, config_file: Callable[[str], Path]
) -> None:
    path = config_file('[model_impl]\nLlamaForCausalLM = "transformers"\n')
    assert kind_of(llama)[0] == "TransformersForCausalLM"
    assert f"[model_impl] in {path}" in str(resolve(llama).trace.find("backend"))
    assert resolve(llama, model_impl="native").backend == "native"
    config_file('[model_impl]\nGPTNeoXForCausalLM = "native"\n')
    assert resolve(llama).backend == "native"
    with pytest.raises(ModelbayError, match="model_impl=native cannot build 'GPTNeoXForCausalLM'"):
        resolve(neox)


def test_a1_a_config_file_may_decide_for_all(llama: str, config_file: Callable[[str], Path]) -> None:
    config_file('[args]\nmodel-impl = "transformers"\n')
    assert resolve(llama).backend == "transformers"
    assert resolve(llama, model_impl="native").backend == "native"


def test_a1_the_flag(llama: str, capsys: pytest.CaptureFixture[str], config_file: Callable[[str], Path]) -> None:
    config_file('[model_impl]\nLlamaForCausalLM = "native"\n')
    shown = {}
    for flags in ([], ["--model-impl", "transformers"]):
        argv = ["generate", llama, "--prompt", "The fox", "--max-tokens", "8", "--temperature", "0", "--json"]
        assert run([*argv, "--dtype", "float32", "--device", "cpu", *flags]) == 0
        shown[bool(flags)] = json.loads(capsys.readouterr().out)[0]["outputs"][0]["token_ids"]
        assert run(["explain", llama, "--json", "--device", "cpu", *flags]) == 0
        explained = json.loads(capsys.readouterr().out)["resolution"]
        assert explained["backend"] == ("transformers" if flags else "native")
    assert shown[True] == shown[False]


def test_a1_an_unknown_one_is_a_usage_error(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", llama, "--model-impl", "transformer"]) == 2
    assert "unknown model_impl 'transformer'" in capsys.readouterr().err


def test_a_class_that_transformers_does_not_have_is_refused_though_it_knows_the_type(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(ArchitectureError, match="no class FooForCausalLM"):
        resolve(str(path))
