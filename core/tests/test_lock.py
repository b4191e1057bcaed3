"""`modelbay lock` and locked runs: what a run is made of, by content, and refusal of what differs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from modelbay import resolve
from modelbay.cli.main import run
from modelbay.errors import LockError, RevisionNotFoundError, UsageError, WeightsError
from modelbay.hookspecs import hookimpl
from modelbay.lock import _PINNED, Lock
from modelbay.specs import ArchSpec, BackendSpec
from modelbay_testing.hub import LocalHub

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "torch_dtype": "float32",
}
INDEX = json.dumps({"weight_map": {"a": "w-1.safetensors", "b": "w-2.safetensors"}})
MODEL: dict[str, str | bytes] = {
    "config.json": json.dumps(CONFIG),
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "model.safetensors.index.json": INDEX,
    "w-1.safetensors": b"one",
    "w-2.safetensors": b"two",
    "README.md": "not used",
    "unused.safetensors": b"three",
}
USED = set(MODEL) - {"README.md", "unused.safetensors"}
CODE = {"conf.py": "from transformers import LlamaConfig\nclass Conf(LlamaConfig):\n    model_type = 'brook'\n"}


class Backend:
    def assess(self, *arguments: Any) -> Any:
        from modelbay.backends import Verdict

        return Verdict(True, "it says so")


def plugin_module(name: str) -> ModuleType:
    """A plugin with an architecture and a backend that accepts everything."""
    module = ModuleType(name)

    @hookimpl
    def register_architectures() -> list[ArchSpec]:
        names = ("LlamaForCausalLM", "BrookForCausalLM")
        return [ArchSpec(name=each, target="x:Y", model_types=("llama", "brook")) for each in names]

    @hookimpl
    def register_modeling_backends() -> list[BackendSpec]:
        return [BackendSpec(name="native", target=f"{name}:Backend")]

    module.register_architectures = register_architectures  # type: ignore[attr-defined]
    module.register_modeling_backends = register_modeling_backends  # type: ignore[attr-defined]
    module.Backend = Backend  # type: ignore[attr-defined]
    return module


PLUGIN = plugin_module("acme_llama")


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`resolve` with the plugin above alone."""
    monkeypatch.setitem(sys.modules, PLUGIN.__name__, PLUGIN)
    monkeypatch.setenv("MODELBAY_CONFIG", "")
    monkeypatch.setenv("MODELBAY_PLUGINS", "")
    return lambda model, **kwargs: resolve(str(model), **{"plugins": [PLUGIN], **kwargs})


def write(root: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def locked(resolution: Any, path: Path) -> str:
    Lock.of(resolution).write(path)
    return str(path)


def sha256(content: Any) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()


def test_a_lock_has_every_file_that_is_used_and_no_other(tmp_path: Path, ask: Callable[..., Any]) -> None:
    data = Lock.of(ask(write(tmp_path / "model", MODEL))).data
    assert data["model"]["files"] == {name: sha256(MODEL[name]) for name in USED}
    assert data["tokenizer"] is None
    assert data["code"] == []
    assert data["args"] == {}
    assert data["resolution"] == {
        "architecture": "LlamaForCausalLM",
        "served_by": "LlamaForCausalLM",
        "task": "generate",
        "backend": "native",
        "load_format": "safetensors",
        "dtype": "float32",
        "max_model_len": 32,
    }
    assert {"modelbay", "torch", "transformers"} <= set(data["versions"])
    assert data["plugins"] == {"(in-process) acme_llama": ""}


def test_the_same_content_elsewhere_is_the_same_run(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", MODEL)
    lock = locked(ask(model, max_model_len=16, hf_overrides={"rms_norm_eps": 1e-3}), tmp_path / "modelbay.lock")
    shutil.copytree(model, tmp_path / "moved")
    resolution = ask(tmp_path / "moved", locked=lock)
    assert resolution.config.max_model_len == 16
    assert resolution.args.hf_overrides == {"rms_norm_eps": 1e-3}
    assert resolution.trace.find("lock").answer["pinned"] == {
        "max_model_len": 16,
        "hf_overrides": {"rms_norm_eps": 1e-3},
    }
    assert resolution.trace.find("lock check").answer.startswith("7 files")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w-2.safetensors": b"twO"}, "model file w-2.safetensors has another content"),
        ({"chat_template.jinja": "x"}, "model file chat_template.jinja: not locked"),
        ({"generation_config.json": None}, "model file generation_config.json: locked, absent here"),
        ({"README.md": "other"}, None),
        ({"unused.safetensors": b"other"}, None),
    ],
)
def test_files_that_differ_are_named(tmp_path: Path, ask: Callable[..., Any], change: Any, said: str | None) -> None:
    model = write(tmp_path / "model", MODEL)
    lock = locked(ask(model), tmp_path / "modelbay.lock")
    for name, content in change.items():
        (model / name).unlink() if content is None else write(model, {name: content})
    if said is None:
        ask(model, locked=lock)
        return
    with pytest.raises(LockError) as caught:
        ask(model, locked=lock)
    assert str(caught.value).startswith(f"this run is not the one of {lock}: {said}. ")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda data: data["versions"].update(torch="1.0"), "torch: locked 1.0, here "),
        (lambda data: data["versions"].pop("transformers"), "transformers: locked none, here "),
        (lambda data: data["plugins"].update({"modelbay-x": "2.0"}), "plugin modelbay-x: locked 2.0, here none"),
        (lambda data: data["plugins"].clear(), "plugin (in-process) acme_llama: locked none, here "),
        (lambda data: data["resolution"].update(backend="transformers"), "backend: locked transformers, here native"),
    ],
)
def test_versions_plugins_and_decisions_that_differ_are_named(
    tmp_path: Path, ask: Callable[..., Any], edit: Callable[[Any], Any], said: str
) -> None:
    model = write(tmp_path / "model", MODEL)
    path = Path(locked(ask(model), tmp_path / "modelbay.lock"))
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(LockError) as caught:
        ask(model, locked=str(path))
    assert said in str(caught.value)


def test_a_setting_that_contradicts_the_lock_is_refused(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", MODEL)
    lock = locked(ask(model, dtype="bfloat16"), tmp_path / "modelbay.lock")
    assert ask(model, locked=lock).config.dtype == "bfloat16"
    with pytest.raises(LockError, match=r"argument dtype: locked bfloat16, here float16; dtype: locked bfloat16, here"):
        ask(model, locked=lock, dtype="float16")
    with pytest.raises(LockError, match=r"argument seed: locked 0, here 5"):
        ask(model, locked=lock, seed=5)


def test_a_repository_that_moved_is_run_at_the_locked_commit(
    hub: LocalHub, tmp_path: Path, ask: Callable[..., Any]
) -> None:
    repo = hub.repo("org/model")
    first = repo.commit(MODEL)  # type: ignore[arg-type]
    lock = locked(ask("org/model"), tmp_path / "modelbay.lock")
    assert not [name for name in hub.downloads() if name.startswith("w-")], "weights are known by the listing's SHA-256"
    second = repo.commit({"config.json": json.dumps({**CONFIG, "max_position_embeddings": 64})})
    shutil.rmtree(tmp_path / "hf")
    resolution = ask("org/model", locked=lock)
    assert (resolution.files.commit, resolution.config.max_model_len) == (first, 32)
    with pytest.raises(LockError, match=rf"model: commit locked {first}, here {second}; model file config\.json has"):
        ask("org/model", locked=lock, revision="main")
    with pytest.raises(RevisionNotFoundError):
        ask("org/model", locked=lock, revision="nope")


def test_a_damaged_weight_in_the_cache_is_seen(hub: LocalHub, tmp_path: Path, ask: Callable[..., Any]) -> None:
    hub.repo("org/model").commit(MODEL)  # type: ignore[arg-type]
    resolution = ask("org/model")
    [weight] = resolution.files.fetch(["w-1.safetensors"])
    lock = locked(resolution, tmp_path / "modelbay.lock")
    weight.write_bytes(b"onE")
    with pytest.raises(LockError, match=r"model file w-1\.safetensors has another content"):
        ask("org/model", locked=lock)


def test_a_tokenizer_of_its_own_is_pinned_too(hub: LocalHub, tmp_path: Path, ask: Callable[..., Any]) -> None:
    hub.repo("org/model").commit(MODEL)  # type: ignore[arg-type]
    words = hub.repo("org/words")
    first = words.commit({"tokenizer.json": "{}"})
    lock = locked(ask("org/model", tokenizer="org/words"), tmp_path / "modelbay.lock")
    words.commit({"tokenizer.json": "{ }"})
    shutil.rmtree(tmp_path / "hf")
    args = ask("org/model", locked=lock).args
    assert (args.tokenizer, args.tokenizer_revision) == ("org/words", first)
    with pytest.raises(
        LockError, match=rf"tokenizer: commit locked {first}, here .*tokenizer file tokenizer\.json has"
    ):
        ask("org/model", locked=lock, tokenizer_revision="main")


def test_code_is_locked_where_it_is_trusted(hub: LocalHub, tmp_path: Path, ask: Callable[..., Any]) -> None:
    code = hub.repo("org/code")
    first = code.commit(CODE)
    config = {
        **CONFIG, "model_type": "brook", "architectures": ["BrookForCausalLM"],
        "auto_map": {"AutoConfig": "org/code--conf.Conf"},
    }  # fmt: skip
    hub.repo("org/model").commit({**MODEL, "config.json": json.dumps(config)})  # type: ignore[arg-type]
    resolution = ask("org/model", trust_remote_code=True)
    lock = locked(resolution, tmp_path / "modelbay.lock")
    [entry] = json.loads(Path(lock).read_text())["code"]
    assert (entry["repository"], entry["commit"]) == ("org/code", first)
    assert entry["files"] == {"conf.py": sha256(CODE["conf.py"])}
    second = code.commit({"conf.py": CODE["conf.py"] + "# newer\n"})
    shutil.rmtree(tmp_path / "hf")
    assert ask("org/model", trust_remote_code=True, locked=lock).args.code_revision == first
    assert run(["trust", "add", "org/model", "--code-revision", second]) == 0
    with pytest.raises(LockError, match=rf"code of the model in org/code: commit locked {first}, here {second}"):
        ask("org/model", trust_remote_code=True, locked=lock, code_revision=second)


def pooling(*paths: str) -> dict[str, str | bytes]:
    """A checkpoint that sentence-transformers wrote: the root, a pooling, and dense layers in the folders named."""
    first, *rest = paths
    kinds = {"": "models.Transformer", first: "models.Pooling", **dict.fromkeys(rest, "models.Dense")}
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for path, kind in kinds.items()]
    return {
        **MODEL, "modules.json": json.dumps(modules), f"{first}/config.json": '{"pooling_mode_mean_tokens": true}',
        **{f"{path}/config.json": '{"in_features": 16, "out_features": 4}' for path in rest},
        **{f"{path}/model.safetensors": b"dense" for path in rest},
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["1_Pooling", "pooling", "modules/pooling"])
@pytest.mark.parametrize("dense", ["2_Dense", "dense/a"])
def test_p1_the_folders_that_modules_json_names_are_locked(
    tmp_path: Path, ask: Callable[..., Any], folder: str, dense: str
) -> None:
    content = {**pooling(folder, dense), "3_Unused/config.json": "{}"}
    model = write(tmp_path / "model", content)
    resolution = ask(model)
    assert resolution.task == "embed"
    lock = locked(resolution, tmp_path / "modelbay.lock")
    inside = {f"{folder}/config.json", f"{dense}/config.json", f"{dense}/model.safetensors"}
    assert json.loads(Path(lock).read_text())["model"]["files"].keys() == {*USED, "modules.json", *inside}
    for name in sorted(inside):
        write(model, {name: content[name] + (b" " if isinstance(content[name], bytes) else " ")})  # type: ignore[operator]
        with pytest.raises(LockError, match=rf"model file {name} has another content"):
            ask(model, locked=lock)
        write(model, {name: content[name]})
    ask(model, locked=lock)


def test_p1_a_pooling_config_without_modules_json_is_locked(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", {**MODEL, "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}'})
    lock = locked(ask(model, runner="pooling", convert="embed"), tmp_path / "modelbay.lock")
    write(model, {"1_Pooling/config.json": '{"pooling_mode_max_tokens": true}'})
    with pytest.raises(LockError, match=r"model file 1_Pooling/config\.json has another content"):
        ask(model, locked=lock)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab-src.json", "entity_vocab.json", "bpe.codes"])
def test_files_of_less_common_tokenizers_are_locked(tmp_path: Path, ask: Callable[..., Any], name: str) -> None:
    model = write(tmp_path / "model", {**MODEL, name: "one"})
    lock = locked(ask(model), tmp_path / "modelbay.lock")
    write(model, {name: "two"})
    with pytest.raises(LockError, match=rf"model file {name} has another content"):
        ask(model, locked=lock)


def test_whatever_a_tokenizer_of_the_repository_may_read_is_locked(tmp_path: Path, ask: Callable[..., Any]) -> None:
    said = json.dumps({"auto_map": {"AutoTokenizer": ["tok.Tok", None]}})
    model = write(tmp_path / "model", {**MODEL, "tokenizer_config.json": said, "own.voc": "one"})
    lock = locked(ask(model), tmp_path / "modelbay.lock")
    assert json.loads(Path(lock).read_text())["model"]["files"].keys() == {*USED, "own.voc"}
    write(model, {"own.voc": "two"})
    with pytest.raises(LockError, match=r"model file own\.voc has another content"):
        ask(model, locked=lock)


def test_c10_a_generation_config_elsewhere_is_locked_by_what_it_says(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", MODEL)
    other = write(tmp_path / "other", {"generation_config.json": '{"temperature": 0.5}'})
    lock = locked(ask(model, generation_config=str(other)), tmp_path / "modelbay.lock")
    assert ask(model, locked=lock).config.generation == {"temperature": 0.5}
    write(other, {"generation_config.json": '{"temperature": 0.7}'})
    with pytest.raises(LockError, match=r"generation_config: locked .*0\.5.*, here .*0\.7"):
        ask(model, locked=lock)


@pytest.mark.parametrize("load_format", ["pt", "safetensors"])
def test_w1_a_lock_without_weights_is_not_written(tmp_path: Path, ask: Callable[..., Any], load_format: str) -> None:
    files = {name: content for name, content in MODEL.items() if ".safetensors" not in name}
    model = write(tmp_path / "model", {**files, **(MODEL if load_format == "pt" else {"pytorch_model.bin": b"x"})})
    with pytest.raises(WeightsError, match=f"load_format='{load_format}' was asked for"):
        Lock.of(ask(model, load_format=load_format))
    Lock.of(ask(model, load_format="dummy"))


@pytest.mark.parametrize(
    "said",
    [
        {"runner": "pooling"}, {"convert": "embed"}, {"runner": "pooling", "convert": "embed"},
        {"load_format": "safetensors"}, {"model_impl": "native"}, {"dtype": "float32"}, {"max_model_len": 32},
    ],
)  # fmt: skip
def test_an_argument_that_decides_what_was_decided_anyway_is_no_difference(
    tmp_path: Path, ask: Callable[..., Any], said: dict[str, Any]
) -> None:
    """`lock` then `embed`, which says what it is for."""
    model = write(tmp_path / "model", pooling("1_Pooling"))
    plain, full = (tmp_path / name for name in ("plain.lock", "full.lock"))
    ask(model, locked=locked(ask(model), plain), **said)
    ask(model, locked=locked(ask(model, **said), full))


def test_an_argument_that_decides_something_else_is_named_first(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", MODEL)
    lock = locked(ask(model), tmp_path / "modelbay.lock")
    with pytest.raises(LockError, match=r"argument convert: locked auto, here embed; .*task: locked generate, here e"):
        ask(model, locked=lock, convert="embed")
    with pytest.raises(LockError, match="argument dtype: locked auto, here backbone"):
        ask(model, locked=lock, dtype="backbone")


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": 7}', '{"format": 1, "model": {}}'])
def test_what_is_no_lock_is_a_usage_error(tmp_path: Path, ask: Callable[..., Any], content: str | None) -> None:
    if content is not None:
        write(tmp_path, {"modelbay.lock": content})
    with pytest.raises(UsageError, match=r"modelbay\.lock"):
        ask(write(tmp_path / "model", MODEL), locked=str(tmp_path / "modelbay.lock"))


SHA = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(extra=1), "the file has unknown key 'extra'"),
        (lambda data: data.pop("code"), "the file has no key 'code'"),
        (lambda data: data.update(format=True), "format True, this version reads 1"),
        (lambda data: data.update(args=[]), r"args must be an object, got \[\]"),
        (lambda data: data["args"].update(model="x"), "args has 'model', which no lock pins"),
        (
            lambda data: data["args"].update(seed="many"),
            r"not a lock .*: args\.seed must be an integer, got 'many'\. W",
        ),
        (lambda data: data["args"].update(seed=[]), r"is not a lock .*: args\.seed must be an integer, got \[\]\. W"),
        (lambda data: data["args"].update(seed=True), r"args\.seed must be an integer, got True"),
        (lambda data: data["args"].update(seed=1.0), r"args\.seed must be an integer, got 1\.0"),
        (lambda data: data["args"].update(dtype=[]), r"args\.dtype must be a string, got \[\]"),
        (lambda data: data["args"].update(runner=[]), r"args\.runner must be a string, got \[\]"),
        (lambda data: data["args"].update(runner="x"), r"args\.runner must be one of auto, generate, pooling, got 'x'"),
        (lambda data: data["args"].update(load_format={}), r"args\.load_format must be a string, got \{\}"),
        (lambda data: data["args"].update(hf_overrides=[]), r"args\.hf_overrides must be a mapping, got \[\]"),
        (lambda data: data["args"].update(max_model_len=0), r"args\.max_model_len must be a positive integer, got 0"),
        (lambda data: data["code"].append(None), r"code\[0\] must be an object, got None"),
        (lambda data: data.update(plugins=None), "plugins must be an object, got None"),
        (lambda data: data["versions"].update(torch=2), "versions.torch must be text, got 2"),
        (lambda data: data["resolution"].update(dtype=[]), "resolution.dtype must be text, a number or null"),
        (lambda data: data.update(code={}), "code must be a list"),
        (lambda data: data["code"].append({}), r"code\[0\] has no key 'reference'"),
        (lambda data: data.update(tokenizer=[]), "tokenizer must be an object"),
        (lambda data: data["model"].update(commit="main"), "model.commit must be a full commit .* got 'main'"),
        (lambda data: data["model"].update(commit=7), "model.commit must be a full commit .* got 7"),
        (lambda data: data["model"].update(repository="../a/b"), "model.repository must be a hub id or null"),
        (lambda data: data["model"].update(repository=["a/b"]), "model.repository must be a hub id or null"),
        (lambda data: data["model"].update(reference=1), "model.reference must be text or null, got 1"),
        (lambda data: data["model"].update(since="x"), "model has unknown key 'since'"),
        (lambda data: data["model"].update(files=[]), "model.files must be an object"),
        (lambda data: data["model"]["files"].update({"config.json": "abc"}), "must be a SHA-256, got 'abc'"),
        (lambda data: data["model"]["files"].update({"config.json": None}), "must be a SHA-256, got None"),
        (lambda data: data["model"]["files"].update({"../x": SHA}), "must be a path inside the model, got '../x'"),
    ],
)
def test_a_lock_that_was_edited_by_hand_says_what_is_wrong(
    tmp_path: Path, ask: Callable[..., Any], change: Callable[[Any], Any], said: str
) -> None:
    model = write(tmp_path / "model", MODEL)
    path = Path(locked(ask(model), tmp_path / "modelbay.lock"))
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=said):
        ask(model, locked=str(path))


def test_a_key_that_a_lock_has_twice_is_refused(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / "model", MODEL)
    path = Path(locked(ask(model), tmp_path / "modelbay.lock"))
    path.write_text(path.read_text().replace('"plugins"', '"args": {},\n "plugins"'))
    with pytest.raises(UsageError, match="the key 'args' twice"):
        ask(model, locked=str(path))


def test_settings_of_a_lock_that_are_null_are_not_said(tmp_path: Path, ask: Callable[..., Any]) -> None:
    """As everywhere: `LLM(seed=None)` is `LLM()`."""
    model = write(tmp_path / "model", MODEL)
    path = Path(locked(ask(model), tmp_path / "modelbay.lock"))
    data = json.loads(path.read_text())
    data["args"] = dict.fromkeys(_PINNED)
    path.write_text(json.dumps(data))
    plain, resolution = ask(model), ask(model, locked=str(path))
    assert resolution.args.replace(locked=None) == plain.args
    assert resolution.trace.find("lock").answer["pinned"] == {}


def test_a_directory_whose_name_is_no_utf8_is_locked(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model = write(tmp_path / os.fsdecode(b"m\xff"), MODEL)
    lock = locked(ask(model), tmp_path / "modelbay.lock")
    assert json.loads(Path(lock).read_text(encoding="utf-8"))["model"]["reference"] == str(model)
    ask(model, locked=lock)


def test_objects_that_python_takes_are_locked_as_what_they_say(tmp_path: Path, ask: Callable[..., Any]) -> None:
    model, elsewhere = write(tmp_path / "model", MODEL), write(tmp_path / "other", {"generation_config.json": "{}"})
    lock = locked(ask(model, dtype=torch.bfloat16, generation_config=elsewhere), tmp_path / "modelbay.lock")
    assert json.loads(Path(lock).read_text())["args"] == {"dtype": "bfloat16", "generation_config": str(elsewhere)}
    assert ask(model, locked=lock).config.dtype == "bfloat16"
    ask(model, locked=lock, dtype="bfloat16", generation_config=str(elsewhere))


@pytest.mark.parametrize("name", ["", " "])
def test_an_output_without_a_name_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(["lock", str(write(tmp_path / "model", MODEL)), "-o", name]) == 2
    assert "--output is empty" in capsys.readouterr().err


def test_the_command_writes_a_file_that_a_locked_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the plugins that are installed; `explain --locked` walks the same way as `generate --locked`."""
    model = write(tmp_path / "model", MODEL)
    monkeypatch.chdir(tmp_path)
    assert run(["lock", str(model), "--dtype", "bfloat16"]) == 0
    assert "wrote modelbay.lock: 7 files" in capsys.readouterr().out
    assert run(["lock", str(model), "--dtype", "bfloat16", "-o", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "modelbay.lock").read_text()
    assert run(["explain", str(model), "--no-build", "--locked", "modelbay.lock"]) == 0
    assert "lock check: 7 files" in capsys.readouterr().out
    write(model, {"w-1.safetensors": b"onE"})
    assert run(["generate", str(model), "--prompt", "x", "--locked", "modelbay.lock"]) == 1
    assert "this run is not the one of modelbay.lock: model file w-1.safetensors" in capsys.readouterr().err


def test_a_lock_never_takes_the_place_of_what_is_no_file(tmp_path: Path) -> None:
    """A directory, a pipe (a device is the same case); a link is written through, and stays one."""
    lock = Lock({"model": {}})
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UsageError, match="no file"):
            lock.write(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    lock.write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "file").read_text())["model"] == {}
