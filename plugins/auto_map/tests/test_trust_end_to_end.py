"""Custom models and trust, through every door: `LLM`, `resolve`, the commands (cases 6 to 11)."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelbay import LLM, SamplingParams, resolve
from modelbay.cli.main import run
from modelbay.errors import ModelbayError, TrustError
from modelbay_testing.hub import LocalHub
from modelbay_testing.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def arm(folder: Path, sentinel: Path) -> None:
    """Let every Python file of a repository leave a trace when it is imported."""
    for path in folder.rglob("*.py"):
        docstring, _, rest = path.read_text().partition("\n")
        path.write_text(f"{docstring}\nopen({str(sentinel)!r}, 'a').write({path.name!r})\n{rest}")


@pytest.fixture
def sentinel(tmp_path: Path) -> Path:
    return tmp_path / "sentinel"


def doors(model: str) -> dict[str, Callable[[], Any]]:
    """Every way to ask for a model, without trust."""
    return {
        "LLM": lambda: LLM(model, device="cpu"),
        "LLM, trust off": lambda: LLM(model, device="cpu", trust_remote_code=False),
        "resolve": lambda: resolve(model),
        "resolve, transformers": lambda: resolve(model, model_impl="transformers"),
        "resolve, auto_map": lambda: resolve(model, model_impl="auto_map"),
        "resolve, pooling": lambda: resolve(model, runner="pooling"),
        "dummy weights": lambda: LLM(model, device="cpu", load_format="dummy"),
    }


@pytest.mark.parametrize("name", ["lumen", "quill", "hive", "grove"])
@pytest.mark.parametrize("door", list(doors("")))
def test_without_trust_one_error_names_repository_and_flag_and_nothing_runs(
    name: str, door: str, code: Callable[..., Path], sentinel: Path
) -> None:
    folder = code(name)
    arm(folder, sentinel)
    with pytest.raises(TrustError) as caught:
        doors(str(folder))[door]()
    message = str(caught.value)
    assert str(folder) in message
    assert "--trust-remote-code" in message
    assert "\n" not in message
    assert not sentinel.exists()


@pytest.mark.parametrize("command", ["generate", "explain", "explain --no-build", "explain --model-impl transformers"])
def test_the_commands_never_prompt(
    command: str,
    code: Callable[..., Path],
    sentinel: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 6: with stdin at its end, one line, exit code 1."""
    folder = code("lumen")
    arm(folder, sentinel)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    verb, *flags = command.split()
    more = ["--prompt", "x"] if verb == "generate" else []
    assert run([verb, str(folder), *more, *flags]) == 1
    shown = capfd.readouterr().err.strip().splitlines()
    [error] = [line for line in shown if line.startswith("error: ")]
    assert str(folder) in error
    assert "--trust-remote-code" in error
    assert not sentinel.exists()


def test_code_beside_a_type_that_transformers_has_never_runs_unasked(tmp_path: Path, sentinel: Path) -> None:
    """Case 7: auto_map in the top-level config, a nested config and tokenizer_config, of a model that needs none."""
    folder = tiny_checkpoint(tmp_path / "model", "gpt_neox", hidden_act="gelu")
    (folder / "modeling_own.py").write_text("class Own: pass\n")
    arm(folder, sentinel)
    own = "modeling_own.Own"
    for file, changes in {
        "config.json": {
            "auto_map": {"AutoConfig": own, "AutoModel": own, "AutoModelForCausalLM": own},
            "some_config": {"auto_map": {"AutoConfig": own}},
        },
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": [own, own]}},
    }.items():
        values = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**values, **changes}))
    with LLM(str(folder), device="cpu", dtype="float32", trust_remote_code=False) as llm:
        assert llm.resolution.backend == "transformers"
        assert len(llm.generate("The fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
    assert not sentinel.exists()
    with pytest.raises(ModelbayError, match=r"which is not trusted: read it, then pass --trust-remote-code"):
        resolve(str(folder), model_impl="auto_map")
    assert not sentinel.exists()


def test_a_plugins_own_config_class_does_not_open_the_gate_for_the_model(
    code: Callable[..., Path], sentinel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config needs no code then; the model class still does."""
    from types import ModuleType

    from modelbay import hookimpl
    from modelbay.specs import ConfigClassSpec

    plugin = ModuleType("acme_lumen")

    @hookimpl
    def register_config_classes() -> list[ConfigClassSpec]:
        return [ConfigClassSpec(model_type="lumen", target="modelbay.config.plain:PlainConfig")]

    plugin.register_config_classes = register_config_classes  # type: ignore[attr-defined]
    facts = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    folder = code("lumen", config=facts)
    arm(folder, sentinel)
    with pytest.raises(ModelbayError) as caught:
        resolve(str(folder), plugins=[plugin])
    assert f"code of {folder}, which is not trusted: read it, then pass --trust-remote-code" in str(caught.value)
    assert not sentinel.exists()


@pytest.mark.parametrize("name", ["dotted.name-v1.5", "with space", "déjà"])
def test_names_of_directories_do_not_matter(
    name: str, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 8: a dot in the name, `.` as the path, a trailing slash: the same class, the same text."""
    folder = make_checkpoint("lumen", name)
    monkeypatch.chdir(folder)
    texts, classes = set(), set()
    for path in (str(folder), f"{folder}{os.sep}", ".", f".{os.sep}", f"..{os.sep}{name}"):
        with LLM(path, trust_remote_code=True, device="cpu", dtype="float32") as llm:
            texts.add(tuple(llm.generate("The fox", GREEDY, use_tqdm=False)[0].outputs[0].token_ids))
            classes.add(llm.apply_model(lambda model: type(model.base))[0])
    assert len(texts) == len(classes) == 1


def test_a_change_three_files_deep_is_another_model(
    make_checkpoint: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    """Cases 9 and 10: modeling imports attention imports rotary; all are copied, and each is part of the key."""
    folder = make_checkpoint("lumen")
    first = open_llm(folder)
    before = first.encode("The quick brown fox", use_tqdm=False)[0].hidden_states
    rotary = folder / "rotary.py"
    rotary.write_text(rotary.read_text().replace("even * cos - odd * sin", "even * cos + odd * sin"))
    assert run(["trust", "add", str(folder)]) == 0
    second = open_llm(folder)
    bases = [llm.apply_model(lambda model: type(model.base))[0] for llm in (first, second)]
    assert bases[0] is not bases[1]
    after, again = (llm.encode("The quick brown fox", use_tqdm=False)[0].hidden_states for llm in (second, first))
    assert (after - before).abs().max() > 1e-2
    assert (again - before).abs().max() < 1e-5


def test_the_config_object_and_the_class_pickle(
    make_checkpoint: Callable[..., Path], open_llm: Callable[..., LLM]
) -> None:
    """Case 10."""
    llm = open_llm(make_checkpoint("grove"))
    config = llm.resolution.config.hf
    [base] = llm.apply_model(lambda model: type(model.base))
    again = pickle.loads(pickle.dumps((config, base)))
    assert type(again[0]) is type(config)
    assert again[1] is base
    # The config that the model's module imports is the class that the config became.
    assert base.config_class is type(config)


def test_code_in_another_repository_is_taken_at_its_own_revision(
    code: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Case 11: the model's commit is never sent to the repository of the code."""
    from modelbay_runtime.build import build_model

    folder = code("lumen")
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with LocalHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code_commit = hub.repo("org/code").commit({path.name: path.read_bytes() for path in folder.glob("*.py")})
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {key: f"org/code--{value}" for key, value in config["auto_map"].items()}
        files = {path.name: path.read_bytes() for path in folder.glob("*.json") if path.name != "config.json"}
        model_commit = hub.repo("org/model").commit({**files, "config.json": json.dumps(config)})
        resolution = resolve("org/model", revision=model_commit, trust_remote_code=True, dtype="float32")
        build_model(resolution)
        loaded = [decision.answer for decision in resolution.trace if decision.question.startswith("remote code: ")]
        assert [entry["class"] for entry in loaded] == ["LumenConfig", "LumenModel", "LumenForCausalLM"]
        assert {entry["commit"] for entry in loaded} == {code_commit}
        asked = [request.path for request in hub.requests if "org/code" in request.path]
        assert asked
        assert not any(model_commit in path for path in asked)
