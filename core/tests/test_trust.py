"""The trust gate: nothing runs without trust; with it, the right files, at the right commit, as one class."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelbay import resolve
from modelbay.cli.main import run
from modelbay.errors import ConfigError, OfflineError, RemoteCodeError, RevisionNotFoundError, TrustError
from modelbay.source import ModelFiles, find_files
from modelbay.trace import Trace
from modelbay.trust import load_remote_class
from modelbay_testing.hub import LocalHub

CODE = {
    "config.json": '{"auto_map": {"AutoConfig": "configuration_a.AConfig"}}',
    "configuration_a.py": "from .b import Base\nclass AConfig(Base):\n    value = 1\n",
    "b.py": "from .sub.c import Root\nclass Base(Root): pass\n",
    "sub/c.py": "from ..d import NAME\nfrom . import e\nclass Root:\n    name = NAME\n    other = e.OTHER\n",
    "sub/e.py": "OTHER = 5\n",
    "d.py": "NAME = 'root'\n",
    "unused.py": "raise RuntimeError('nobody imports this')\n",
}

#: Loads the class in another process and prints its module and name.
LOAD = """
import sys
from modelbay.source import find_files
from modelbay.trace import Trace
from modelbay.trust import load_remote_class

trace = Trace()
files = find_files(sys.argv[1], trace=trace)
found = load_remote_class(
    "configuration_a.AConfig", files, trusted=True, code_revision=None, what="x", trace=trace
)
print(found.__module__, found.name)
"""


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path / "modelbay-cache"))
    return tmp_path / "modelbay-cache/remote_code"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def load(
    files: ModelFiles | Path, reference: str = "configuration_a.AConfig", trusted: bool = True, **kwargs: Any
) -> Any:
    if isinstance(files, Path):
        files = find_files(str(files), trace=Trace())
    arguments = {"code_revision": None, "what": "the config class", "trace": Trace(), **kwargs}
    return load_remote_class(reference, files, trusted=trusted, **arguments)


# untrusted


@pytest.mark.parametrize("reference", ["m.C", "org/code--m.C"])
@pytest.mark.parametrize("trusted", [False, None, "false", 0])
def test_untrusted_code_is_neither_run_nor_asked_for(
    hub: LocalHub, tmp_path: Path, reference: str, trusted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 6 and 7."""
    sentinel = tmp_path / "sentinel"
    hostile = f"open({str(sentinel)!r}, 'w')\nclass C: pass\n"
    hub.repo("org/code").commit({"m.py": hostile})
    hub.repo("org/model").commit({"config.json": "{}", "m.py": hostile, "helper.py": hostile})
    files = find_files("org/model", trace=Trace())
    hub.requests.clear()
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked a question"))
    with pytest.raises(TrustError) as caught:
        load(files, reference, trusted=trusted)
    message = str(caught.value)
    assert ("org/code" if "--" in reference else "org/model") in message
    assert all(part in message for part in ("the config class", "class C", "m.py", "--trust-remote-code"))
    assert not sentinel.exists()
    assert hub.requests == []
    assert not (tmp_path / "modelbay-cache").exists()


def test_a_local_directory_needs_trust_too(tmp_path: Path, code_cache: Path) -> None:
    write(
        tmp_path / "model", {"config.json": "{}", "m.py": f"open({str(tmp_path / 'sentinel')!r}, 'w')\nclass C: pass\n"}
    )
    with pytest.raises(TrustError, match=str(tmp_path / "model")):
        load(tmp_path / "model", "m.C", trusted=False)
    assert not (tmp_path / "sentinel").exists()
    load(tmp_path / "model", "m.C")
    assert (tmp_path / "sentinel").exists()


@pytest.mark.parametrize(
    "reference", ["", "Class", "../m.C", "/etc/m.C", "a--b.C", "x/y/z--m.C", "m..C", "m.C;", None, ["m.C"]]
)
def test_a_malformed_entry_is_a_config_error(tmp_path: Path, reference: Any) -> None:
    with pytest.raises(ConfigError, match=r"auto_map entry for the config class"):
        load(write(tmp_path / "model", CODE), reference)


# the closure


def test_the_whole_closure_is_imported_and_nothing_else(tmp_path: Path, code_cache: Path) -> None:
    """Case 9."""
    trace = Trace()
    found = load(write(tmp_path / "model", CODE), trace=trace)
    assert (found.value, found.name, found.other) == (1, "root", 5)
    decision = trace.find("remote code: the config class")
    assert decision is not None
    assert decision.answer["files"] == {
        name: hashlib.sha256(CODE[name].encode()).hexdigest()
        for name in ("b.py", "configuration_a.py", "d.py", "sub/c.py", "sub/e.py")
    }
    assert decision.answer["commit"] is None


@pytest.mark.parametrize("name", ["my.model-v1.5", ".hidden", "with space", "ünï"])
@pytest.mark.parametrize("spelling", ["{}", "{}/", "."])
def test_dots_and_slashes_in_the_directory_name(
    tmp_path: Path, code_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, spelling: str
) -> None:
    """Case 8."""
    root = write(tmp_path / name, CODE)
    monkeypatch.chdir(root if spelling == "." else tmp_path)
    files = find_files(spelling.format(name), trace=Trace())
    assert load(files).name == "root"


def test_packages_inside_the_repository_run_their_init(tmp_path: Path, code_cache: Path) -> None:
    files = {
        "config.json": "{}",
        "m.py": "from .pkg.inner import X\nfrom . import pkg\nclass C:\n    x = X + pkg.Y\n",
        "pkg/__init__.py": "from .more import Y\n",
        "pkg/inner.py": "X = 1\n",
        "pkg/more.py": "Y = 2\n",
    }
    assert load(write(tmp_path / "model", files), "m.C").x == 3


def test_circular_imports_end(tmp_path: Path, code_cache: Path) -> None:
    files = {"config.json": "{}", "m.py": "from . import n\nclass C: pass\n", "n.py": "from . import m\n"}
    assert load(write(tmp_path / "model", files), "m.C").__name__ == "C"


def test_an_optional_relative_import_may_be_absent(tmp_path: Path, code_cache: Path) -> None:
    code = "try:\n    from .fast import X\nexcept ImportError:\n    X = 'slow'\nclass C:\n    x = X\n"
    assert load(write(tmp_path / "model", {"config.json": "{}", "m.py": code}), "m.C").x == "slow"


# identity


def test_one_class_per_content(tmp_path: Path, code_cache: Path) -> None:
    """Case 10."""
    first = load(write(tmp_path / "one", CODE))
    assert load(tmp_path / "one") is first
    assert load(write(tmp_path / "two", CODE)) is first


@pytest.mark.parametrize("prefix", ["", "org/code--"])
def test_the_config_class_that_the_model_imports_is_the_one_loaded_for_the_config(hub: LocalHub, prefix: str) -> None:
    code = {"conf.py": "class Conf: pass\n", "model.py": "from .conf import Conf\nclass Model:\n    config = Conf\n"}
    config = json.dumps(
        {
            "auto_map": {"AutoConfig": f"{prefix}conf.Conf", "AutoModel": [None, f"{prefix}model.Model"]},
            "vision_config": {"auto_map": {"AutoConfig": "broken.X", "AutoModel": "absent.Y"}},
        }
    )
    hub.repo("org/code").commit(code)
    hub.repo("org/model").commit({"config.json": config, "broken.py": "def broken(:\n"} | ({} if prefix else code))
    files = find_files("org/model", trace=Trace())
    assert load(files, f"{prefix}model.Model").config is load(files, f"{prefix}conf.Conf")


def test_an_edited_helper_makes_another_class(tmp_path: Path, code_cache: Path) -> None:
    """Cases 9 and 10."""
    root = write(tmp_path / "model", CODE)
    old = load(root)
    write(root, {"d.py": "NAME = 'edited'\n"})
    assert run(["trust", "add", str(root)]) == 0
    new = load(root)
    assert (old.name, new.name) == ("root", "edited")
    write(root, {"unused.py": "# edited\n"})
    assert load(root) is new


def test_instances_pickle_in_this_process_and_in_another(tmp_path: Path, code_cache: Path) -> None:
    """Case 10."""
    found = load(write(tmp_path / "model", CODE | {"d.py": "NAME = 'pickled'\n"}))
    data = pickle.dumps(found())
    assert type(pickle.loads(data)) is found
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).name)"
    result = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=False)
    assert result.stdout.decode().strip() == "pickled", result.stderr.decode()


def test_processes_and_threads_race_on_an_empty_cache(tmp_path: Path, code_cache: Path) -> None:
    """Case 10."""
    root = write(tmp_path / "model", CODE | {"d.py": "NAME = 'raced'\n"})
    with ThreadPoolExecutor(4) as pool:
        command = [sys.executable, "-c", LOAD, str(root)]
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(4)))
        classes = list(pool.map(lambda _: load(root), range(8)))
    assert len({each.stdout for each in runs}) == 1, [each.stderr for each in runs]
    assert runs[0].stdout.strip() == f"{classes[0].__module__} raced"
    assert len(set(classes)) == 1
    assert [path.name for path in code_cache.iterdir()] == [classes[0].__module__.split(".")[2]]


def test_a_changed_cache_entry_is_replaced(tmp_path: Path, code_cache: Path) -> None:
    root = write(tmp_path / "model", CODE | {"d.py": "NAME = 'good'\n"})
    entry = load(root).__module__.split(".")[2]
    (code_cache / entry / "d.py").write_text("NAME = 'tampered'\n")
    done = subprocess.run([sys.executable, "-c", LOAD, str(root)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [f"modelbay.remote_code.{entry}.configuration_a", "good"], done.stderr
    assert "good" in (code_cache / entry / "d.py").read_text()


def test_a_cache_that_cannot_be_written_does_not_stop_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path / "file"))
    found = load(write(tmp_path / "model", CODE | {"d.py": "NAME = 'no cache'\n"}))
    assert found.name == "no cache"
    assert type(pickle.loads(pickle.dumps(found()))) is found


# revisions (S2)


def test_s2_code_comes_from_the_models_commit(hub: LocalHub) -> None:
    repo = hub.repo("org/model")
    commit = repo.commit(CODE)
    files = find_files("org/model", trace=Trace())
    repo.commit({"d.py": "NAME = 'newer'\n"})
    trace = Trace()
    assert load(files, trace=trace).name == "root"
    assert load(files, "org/model--configuration_a.AConfig").name == "root"
    assert trace.find("remote code: the config class").answer["commit"] == commit  # type: ignore[union-attr]


def test_s2_code_revision_of_the_same_repository(hub: LocalHub) -> None:
    repo = hub.repo("org/model")
    repo.commit(CODE)
    files = find_files("org/model", trace=Trace())
    newer = repo.commit({"d.py": "NAME = 'newer'\n"})
    assert load(files, code_revision=newer).name == "newer"
    with pytest.raises(RevisionNotFoundError):
        load(files, code_revision="nope")


def test_s2_a_commit_of_one_repository_is_never_sent_to_another(hub: LocalHub) -> None:
    """Case 11."""
    model = hub.repo("org/model").commit({"config.json": "{}"})
    code = hub.repo("org/code").commit({name: text for name, text in CODE.items() if name != "config.json"})
    files = find_files("org/model", revision=model, trace=Trace())
    trace = Trace()
    assert load(files, "org/code--configuration_a.AConfig", trace=trace).name == "root"
    assert not [request for request in hub.requests if "org/code" in request.path and model in request.path]
    assert trace.find("remote code: the config class").answer["commit"] == code  # type: ignore[union-attr]
    assert [decision.question for decision in trace.warnings()] == ["code revision"]


def test_s2_code_of_another_repository_at_its_own_revision(hub: LocalHub) -> None:
    hub.repo("org/model").commit({"config.json": "{}"})
    repo = hub.repo("org/code")
    old = repo.commit(CODE)
    repo.commit({"d.py": "NAME = 'newer'\n"})
    files = find_files("org/model", trace=Trace())
    trace = Trace()
    assert load(files, "org/code--configuration_a.AConfig", code_revision=old, trace=trace).name == "root"
    assert not trace.warnings()


def test_a_local_directory_cannot_stand_in_for_the_repository_that_a_model_names(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "org/code", CODE | {"d.py": "NAME = 'planted'\n"})
    hub.repo("org/code").commit(CODE)
    hub.repo("org/model").commit({"config.json": "{}"})
    monkeypatch.chdir(tmp_path)
    files = find_files("org/model", trace=Trace())
    assert load(files, "org/code--configuration_a.AConfig").name == "root"


def test_offline_code_that_is_not_cached_is_listed(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/model").commit(CODE)
    find_files("org/model", trace=Trace()).fetch(["config.json", "configuration_a.py"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match=r"missing: b\.py"):
        load(find_files("org/model", trace=Trace()))


# code that fails


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_package_x.y\n", "needs the Python package no_such_package_x. Install it: pip install"),
        ("from .gone import X\n", r"needs gone\.py, which the repository lacks"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)\n", "SystemExit: 3"),
        ("raise SystemExit\n", "while it was imported: SystemExit$"),
        ("raise GeneratorExit('x')\n", "GeneratorExit: x"),
        ("class Stop(BaseException): pass\nraise Stop('x')\n", "Stop: x"),
        ("class Ctrl(KeyboardInterrupt): pass\nraise Ctrl\n", "Ctrl$"),
        ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd\n", "Odd$"),
        ("class Other: pass\n", r"m\.py of .* has no class C\. Its classes: Other"),
        ("def broken(:\n", r"m\.py of .* failed while it was imported: SyntaxError: .*m\.py, line 1"),
    ],
)
def test_failing_code_is_one_line_with_the_reason(tmp_path: Path, code_cache: Path, code: str, message: str) -> None:
    with pytest.raises(RemoteCodeError, match=message) as caught:
        load(write(tmp_path / "model", {"config.json": "{}", "m.py": code}), "m.C")
    assert "\n" not in str(caught.value)


def test_an_interrupt_while_code_is_imported_stays_one(tmp_path: Path, code_cache: Path) -> None:
    folder = write(tmp_path / "model", {"config.json": "{}", "m.py": "raise KeyboardInterrupt\n"})
    with pytest.raises(KeyboardInterrupt):
        load(folder, "m.C")


def test_a_config_class_that_exits_is_an_error(tmp_path: Path, code_cache: Path) -> None:
    code = "class C:\n    model_type = 'x'\n    def __init__(self, **values):\n        raise SystemExit(0)\n"
    config = json.dumps({"model_type": "x", "architectures": ["X"], "auto_map": {"AutoConfig": "m.C"}})
    folder = write(tmp_path / "model", {"config.json": config, "m.py": code})
    with pytest.raises(RemoteCodeError, match="the config class C raised SystemExit: 0"):
        resolve(str(folder), trust_remote_code=True)


def test_a_missing_module_names_the_ones_there_are(tmp_path: Path, code_cache: Path) -> None:
    with pytest.raises(RemoteCodeError, match=r"has no modeling_x\.py\. Its Python files: m\.py"):
        load(write(tmp_path / "model", {"config.json": "{}", "m.py": ""}), "modeling_x.C")


def test_the_gate_is_light() -> None:
    script = (
        "import sys, modelbay.trust, modelbay.source\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
