"""trust.lock: trust is given to content, recorded on first use, and code that differs is refused until renewed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from modelbay.cli.main import run
from modelbay.errors import TrustError
from modelbay.source import ModelFiles, find_files
from modelbay.trace import Trace
from modelbay.trust import load_remote_class
from modelbay_testing.hub import LocalHub

CONFIG = {"auto_map": {"AutoConfig": "conf.Conf", "AutoModel": "model.Model"}}
CODE = {
    "config.json": json.dumps(CONFIG),
    "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": ["tok.Tok", None]}}),
    "conf.py": "from . import helper\nclass Conf:\n    name = helper.NAME\n",
    "helper.py": "NAME = 'first'\n",
    "model.py": "from .conf import Conf\nclass Model: pass\n",
    "tok.py": "class Tok: pass\n",
}

LOAD = """
import sys
from modelbay.source import find_files
from modelbay.trace import Trace
from modelbay.trust import load_remote_class

for folder in sys.argv[1:]:
    files = find_files(folder, trace=Trace())
    load_remote_class("conf.Conf", files, trusted=True, code_revision=None, what="x", trace=Trace())
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def load(files: ModelFiles | Path, reference: str = "conf.Conf", **kwargs: Any) -> Any:
    if isinstance(files, Path):
        files = find_files(str(files), trace=Trace())
    arguments = {"code_revision": None, "what": "the class", "trace": Trace(), **kwargs}
    return load_remote_class(reference, files, trusted=True, **arguments)


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record of this test; not there yet."""
    monkeypatch.setenv("MODELBAY_CACHE", str(tmp_path / "modelbay-cache"))
    monkeypatch.setenv("MODELBAY_TRUST_LOCK", str(tmp_path / "config" / "trust.lock"))
    return tmp_path / "config" / "trust.lock"


def trusted(lock: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads(lock.read_text())["trusted"]


def test_first_use_records_every_file_and_the_trace_says_so(tmp_path: Path, lock: Path) -> None:
    root, trace = write(tmp_path / "model", CODE), Trace()
    load(root, trace=trace)
    [content] = trusted(lock)[str(root)]
    assert content["commit"] is None
    assert set(content["files"]) == {"conf.py", "helper.py", "model.py", "tok.py"}
    decision = trace.find("remote code: the class")
    assert decision is not None
    assert decision.source.endswith(f"first use, recorded in {lock}")
    assert decision.answer["files"].items() <= content["files"].items()
    assert decision.answer["repository"] == str(root)
    before = lock.read_bytes()
    load(root, "model.Model", trace=trace)
    load(root, "tok.Tok", trace=trace)
    assert lock.read_bytes() == before
    assert f"unchanged since {content['since']}" in trace.find("remote code: the class").source  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"helper.py": "NAME = 'second'\n"}, "helper.py differs"),
        (
            {"conf.py": "from . import helper\nfrom . import extra\nclass Conf: pass\n", "extra.py": ""},
            "extra.py is new",
        ),
        ({"helper.py": "raise SystemExit\n", "model.py": "\n"}, "helper.py differs, model.py differs"),
    ],
)
def test_changed_code_is_refused_by_name_and_not_run(tmp_path: Path, change: dict[str, str], said: str) -> None:
    root = write(tmp_path / "my model", CODE)
    load(root)
    sentinel = tmp_path / "sentinel"
    write(root, {name: f"open({str(sentinel)!r}, 'w')\n{content}" for name, content in change.items()})
    with pytest.raises(TrustError) as caught:
        load(root)
    message = str(caught.value)
    assert said in message
    assert str(root) in message
    assert message.endswith(f"modelbay trust add {shlex.quote(str(root))}")
    assert "\n" not in message
    assert not sentinel.exists()


def test_a_file_that_appears_where_code_looks_for_it_is_refused(tmp_path: Path) -> None:
    """The code that was trusted did not change, but it would import another file now."""
    optional = "try:\n    from .fast import X\nexcept ImportError:\n    X = 'slow'\nclass Conf: pass\n"
    root = write(tmp_path / "model", CODE | {"conf.py": optional})
    load(root)
    write(root, {"fast.py": "X = 1\n"})
    with pytest.raises(TrustError, match=r"fast\.py is new"):
        load(root)


def test_renewed_trust_keeps_the_old_content_trusted(tmp_path: Path, lock: Path) -> None:
    root = write(tmp_path / "model", CODE)
    load(root)
    write(root, {"helper.py": "NAME = 'second'\n"})
    with pytest.raises(TrustError):
        load(root)
    assert run(["trust", "add", str(root)]) == 0
    assert load(root).name == "second"
    assert len(trusted(lock)[str(root)]) == 2
    write(root, {"helper.py": CODE["helper.py"]})
    assert load(root).name == "first"


def test_two_contents_are_not_mixed(tmp_path: Path) -> None:
    """Each file was trusted once, never beside the other."""
    root = write(tmp_path / "model", CODE)
    load(root)
    write(root, {"helper.py": "NAME = 'second'\n", "model.py": "from .conf import Conf\nclass Model:\n    new = 1\n"})
    assert run(["trust", "add", str(root)]) == 0
    write(root, {"helper.py": CODE["helper.py"]})
    with pytest.raises(TrustError, match=r"helper\.py differs"):
        load(root)


def test_a_repository_that_moves_is_refused_and_its_commit_goes_on(hub: LocalHub, lock: Path) -> None:
    repo = hub.repo("org/model")
    first = repo.commit(CODE)
    load(find_files("org/model", trace=Trace()))
    second = repo.commit({"helper.py": "NAME = 'second'\n"})
    moved = find_files("org/model", revision=second, trace=Trace())
    with pytest.raises(TrustError, match=rf"trusted at commit {first} .*helper\.py differs") as caught:
        load(moved)
    assert str(caught.value).endswith(f"modelbay trust add org/model --revision {second}")
    # More files of the commit that was trusted need no second word.
    load(find_files("org/model", revision=first, trace=Trace()), "tok.Tok")
    [content] = trusted(lock)["org/model"]
    assert (content["commit"], set(content["files"])) == (first, {"conf.py", "helper.py", "model.py", "tok.py"})
    assert run(["trust", "add", "org/model", "--revision", second]) == 0
    assert load(moved).name == "second"


def test_a_cached_file_that_somebody_changed_is_seen_at_the_very_commit(hub: LocalHub) -> None:
    hub.repo("org/model").commit(CODE)
    files = find_files("org/model", trace=Trace())
    load(files)
    cached = files.root / "helper.py"
    cached.resolve().write_text(CODE["helper.py"].replace("first", "fir5t"))
    with pytest.raises(TrustError, match=r"helper\.py differs"):
        load(find_files("org/model", trace=Trace()))


def test_a_commit_that_only_changes_weights_needs_no_renewal(hub: LocalHub) -> None:
    repo = hub.repo("org/model")
    repo.commit(CODE)
    load(find_files("org/model", trace=Trace()))
    later = repo.commit({"README.md": "more"})
    assert load(find_files("org/model", revision=later, trace=Trace())).name == "first"


def test_code_of_another_repository_is_recorded_under_its_own_name(hub: LocalHub, lock: Path) -> None:
    code = hub.repo("org/code").commit({name: text for name, text in CODE.items() if name.endswith(".py")})
    config = {"auto_map": {key: f"org/code--{value}" for key, value in CONFIG["auto_map"].items()}}
    hub.repo("org/model").commit({"config.json": json.dumps(config)})
    load(find_files("org/model", trace=Trace()), "org/code--conf.Conf")
    assert list(trusted(lock)) == ["org/code"]
    assert trusted(lock)["org/code"][0]["commit"] == code


def test_an_empty_variable_keeps_no_record(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELBAY_TRUST_LOCK", "")
    root = write(tmp_path / "model", CODE)
    load(root)
    write(root, {"helper.py": "NAME = 'second'\n"})
    assert load(root).name == "second"
    assert not lock.exists()
    assert run(["trust", "add", str(root)]) == 1


def test_it_stands_beside_the_config_file_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELBAY_TRUST_LOCK")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    load(write(tmp_path / "model", CODE))
    assert (tmp_path / "xdg/modelbay/trust.lock").is_file()


def record(**changes: Any) -> str:
    """A record with one content, changed."""
    content = {"commit": None, "since": "2026-01-31T12:00:00+00:00", "files": {"conf.py": "0" * 64}, **changes}
    return json.dumps({"format": 1, "trusted": {"org/x": [content]}})


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "[" * 100_000, '{"format": 2, "trusted": {}}', '{"format": 1, "trusted": {"a": 3}}',
        '{"format": true, "trusted": {}}', '{"format": 1.0, "trusted": {}}', '{"format": "1", "trusted": {}}',
        '{"trusted": {}}', '{"format": 1}', '{"format": 1, "trusted": []}', '{"format": 1, "trusted": null}',
        '{"format": 1, "trusted": {}, "more": 1}',
        '{"format": 1, "trusted": {"a": {}}}', '{"format": 1, "trusted": {"a": []}}',
        '{"format": 1, "trusted": {"a": null}}', '{"format": 1, "trusted": {"a": ""}}',
        '{"format": 1, "trusted": {"a": [[]]}}', '{"format": 1, "trusted": {"a": [{}]}}',
        record(commit=[]), record(commit="main"), record(commit=7), record(commit=False), record(more=1),
        record(since=1), record(since=None), record(since=[]), record(since="long ago"),
        record(files=[]), record(files={}), record(files=None), record(files="conf.py"),
        record(files={"a.py": "abc"}), record(files={"a.py": None}), record(files={"a.py": ["0" * 64]}),
        record(files={"a.py": "0" * 63 + "G"}), record(files={"a.py": "0" * 64 + "\n"}),
        record(files={"../a.py": "0" * 64}), record(files={"/a.py": "0" * 64}), record(files={"": "0" * 64}),
        record().replace('"org/x"', '""'),
        record().removesuffix("}") + ',"trusted":{}}', record().removesuffix("}") + ',"format":1}',
        record().replace('"files": {', '"files": {"conf.py": "%s", ' % ("1" * 64)),
        record().replace('"trusted": {', '"trusted": {"org/x": [], '),
    ],
)  # fmt: skip
def test_a_damaged_record_is_an_error_and_never_an_empty_one(tmp_path: Path, lock: Path, content: str) -> None:
    root = write(tmp_path / "model", CODE)
    write(lock.parent, {"trust.lock": content})
    with pytest.raises(TrustError, match=r"trust\.lock is damaged"):
        load(root)
    assert run(["trust", "add", str(root)]) == 1
    assert lock.read_text() == content


def test_a_record_that_another_one_hides_lets_no_changed_code_through(tmp_path: Path, lock: Path) -> None:
    root = write(tmp_path / "model", CODE)
    load(root)
    content = lock.read_text().rstrip().removesuffix("}") + ',"trusted":{}}'
    lock.write_text(content)
    write(root, {"helper.py": "NAME = 'second'\n"})
    with pytest.raises(TrustError, match=r"damaged: the key 'trusted' twice"):
        load(root)
    assert lock.read_text() == content


def test_what_is_written_is_read_back(tmp_path: Path, lock: Path) -> None:
    """The other side of the checks: a directory whose name is no UTF-8, and the form on this page."""
    root = write(tmp_path / os.fsdecode(b"m\xff\n"), CODE)
    load(root)
    assert list(trusted(lock)) == [str(root)]
    with pytest.raises(TrustError, match=r"helper\.py differs"):
        load(write(root, {"helper.py": "NAME = 'second'\n"}))
    lock.write_text(record(commit="a" * 40))
    assert run(["trust", "list"]) == 0


@pytest.mark.parametrize("name", ["org/\\ud800x", "org/\\u001b[2J\\nx"])
def test_list_prints_what_no_encoding_has_a_word_for(lock: Path, name: str) -> None:
    """A name out of the record is printed escaped: one line for each file, whatever it does to a terminal."""
    write(lock.parent, {"trust.lock": record().replace("org/x", name)})
    for json_flag in ([], ["--json"]):
        command = [sys.executable, "-m", "modelbay", "trust", "list", *json_flag]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
        assert (done.returncode, done.stderr) == (0, b"")
        if json_flag:
            assert json.loads(done.stdout)[0]["repository"] == json.loads(f'"{name}"')
        else:
            assert len(done.stdout.splitlines()) == 2
            assert b"\x1b" not in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="flock")
@pytest.mark.parametrize("command", ["add", "admit", "remove"])
def test_a_record_that_another_process_holds_is_an_error_that_names_the_guard(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    import fcntl

    monkeypatch.setattr("modelbay.trust_lock._LONGEST_WAIT_S", 0.2)
    root = write(tmp_path / "model", CODE)
    write(lock.parent, {"trust.lock": record().replace("org/x", str(root))} if command == "remove" else {"x": ""})
    guard = lock.with_name(".trust.lock.guard")
    with guard.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if command == "admit":
            with pytest.raises(TrustError) as caught:
                load(root)
            said = str(caught.value)
        else:
            assert run(["trust", command, str(root)]) == 1
            said = capsys.readouterr().err
    assert f"another process has held {guard} for 0.2 seconds" in said
    assert "\n" not in said.rstrip()
    if command != "remove":
        assert run(["trust", "add", str(root)]) == 0, "it is free again"


@pytest.mark.skipif(not Path("/proc/1").is_dir(), reason="Linux's /proc")
@pytest.mark.parametrize("path", ["/proc/1/x", "/proc/x/y", "/dev/null/x"])
def test_where_no_file_can_be_made_a_change_ends_at_once(tmp_path: Path, path: str) -> None:
    """Not after the longest wait, which is that for another process."""
    root = write(tmp_path / "model", CODE)
    command = [sys.executable, "-m", "modelbay", "trust", "add", str(root)]
    environ = {**os.environ, "MODELBAY_TRUST_LOCK": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=25)
    assert done.returncode == 1
    assert f"the trust record {path} cannot be" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_record_that_cannot_be_written_still_refuses_what_it_knows(tmp_path: Path, lock: Path) -> None:
    root, other = write(tmp_path / "model", CODE), write(tmp_path / "other", CODE)
    load(root)
    guard = lock.with_name(".trust.lock.guard")
    guard.unlink(missing_ok=True)
    guard.mkdir()  # also root cannot open it
    trace = Trace()
    load(other, trace=trace)
    assert trace.find("trust.lock").answer == "not recorded"  # type: ignore[union-attr]
    write(root, {"helper.py": "NAME = 'second'\n"})
    with pytest.raises(TrustError, match=r"helper\.py differs"):
        load(root)
    assert list(trusted(lock)) == [str(root)]


def test_processes_that_record_at_once_lose_nothing(tmp_path: Path, lock: Path) -> None:
    folders = [write(tmp_path / f"model{i}", CODE) for i in range(6)]
    orders = [folders[:4], folders[2:], folders[::-1]]
    with ThreadPoolExecutor(3) as pool:
        commands = [[sys.executable, "-c", LOAD, *map(str, order)] for order in orders]
        for done in pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands):
            assert done.returncode == 0, done.stderr
    assert {name: len(contents) for name, contents in trusted(lock).items()} == {str(folder): 1 for folder in folders}
    assert sorted(os.listdir(lock.parent)) == [".trust.lock.guard", "trust.lock"]


# -- the commands


def test_add_shows_each_file_with_its_hash_and_runs_nothing(
    tmp_path: Path, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentinel = tmp_path / "sentinel"
    root = write(tmp_path / "model", CODE | {"helper.py": f"open({str(sentinel)!r}, 'w')\nNAME = 'x'\n"})
    assert run(["trust", "add", str(root), "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert (entry["repository"], entry["commit"], entry["status"]) == (str(root), None, "trusted now")
    assert entry["files"] == trusted(lock)[str(root)][0]["files"]
    assert not sentinel.exists()
    assert run(["trust", "add", str(root)]) == 0
    assert "was trusted" in capsys.readouterr().out
    assert load(root).name == "x"


def test_add_of_a_model_without_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "model", {"config.json": "{}"})
    assert run(["trust", "add", str(root)]) == 1
    assert "names no code of its own" in capsys.readouterr().err


def test_list_and_remove(
    tmp_path: Path, lock: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "model", CODE)
    load(root)
    assert run(["trust", "list", "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert entry == {"repository": str(root), **trusted(lock)[str(root)][0]}
    assert run(["trust", "list"]) == 0
    assert entry["files"]["helper.py"] in capsys.readouterr().out
    assert run(["trust", "remove", str(root) + "x"]) == 2
    assert f"Did you mean {str(root)!r}?" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert run(["trust", "remove", "model/"]) == 0
    assert trusted(lock) == {}
    write(root, {"helper.py": "NAME = 'second'\n"})
    assert load(root).name == "second"  # met for the first time again
