"""The hub in motion: repositories that move, processes that race, connections that break (S1-S5)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelbay.errors import ModelbayError, OfflineError, SourceError
from modelbay.hub_cache import CachedRepo
from modelbay.source import ModelFiles, find_files
from modelbay.trace import Trace
from modelbay_testing.hub import LocalHub

WEIGHTS = os.urandom(300_000)
MODEL = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "{}",
    "model.safetensors": WEIGHTS,
    "original/model.safetensors": b"the same again",
}
WANTED = ["config.json", "tokenizer.json", "model.safetensors"]

#: Downloads a model in a process of its own, at a given moment.
DOWNLOAD = """
import sys, time
from modelbay.source import find_files
from modelbay.trace import Trace

names = sys.argv[2:]
while time.time() < float(sys.argv[1]):
    pass
files = find_files("org/name", trace=Trace())
for path in files.fetch(names):
    print(files.commit, len(path.read_bytes()))
"""


def find(reference: str = "org/name", **kwargs: object) -> ModelFiles:
    return find_files(reference, trace=Trace(), **kwargs)  # type: ignore[arg-type]


def cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--org--name"


def contents(files: ModelFiles) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in zip(WANTED, files.fetch(WANTED), strict=True)}


def as_bytes(model: dict[str, object]) -> dict[str, bytes]:
    return {name: value.encode() if isinstance(value, str) else value for name, value in model.items()}  # type: ignore


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[None]:
    """After ``MODEL`` is cached: nothing in the cache can be written, even by root."""
    yield
    for path in [tmp_path, *tmp_path.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


# -- one commit throughout


def test_s2_a_repository_that_moves_between_any_two_requests_gives_one_commit(hub: LocalHub, tmp_path: Path) -> None:
    """Whenever it moves, all files come from the commit that the revision was at first."""
    repo = hub.repo("org/name")
    first = repo.commit(MODEL)
    other = {name: b"moved " + value for name, value in as_bytes(MODEL).items()}
    find().fetch(WANTED)
    total = len(hub.requests)
    for moment in range(1, total + 1):
        shutil.rmtree(tmp_path / "hf")
        repo.refs["main"] = first
        hub.requests.clear()
        answer = hub.fault

        def moving(path: str, *, moment: int = moment, answer: object = answer) -> object:
            if len(hub.requests) > moment:
                repo.commit(other)  # type: ignore[arg-type]
            return answer(path)  # type: ignore[operator]

        hub.fault = moving  # type: ignore[method-assign, assignment]
        files = find()
        assert files.commit == first
        found = contents(files)
        hub.fault = answer  # type: ignore[method-assign]
        assert found == {name: as_bytes(MODEL)[name] for name in WANTED}, f"moved after request {moment}"


def test_s2_the_beginning_of_a_commit_is_that_commit(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = hub.repo("org/name")
    first = repo.commit(MODEL)
    repo.commit({"config.json": '{"model_type": "qwen2"}'})
    files = find(revision=first[:8])
    assert files.commit == first
    files.fetch(WANTED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = find(revision=first[:8])
    assert (again.kind, again.commit) == ("cache", first)
    with pytest.raises(OfflineError, match=r"the cache has it at"):
        find(revision="v2")


def test_s2_a_tag_that_was_moved_is_the_cached_commit_until_the_cache_is_cleared(hub: LocalHub, tmp_path: Path) -> None:
    repo = hub.repo("org/name")
    first = repo.commit(MODEL)
    repo.tag("v1", first)
    find(revision="v1").fetch(WANTED)
    second = repo.commit({"config.json": '{"model_type": "qwen2"}'})
    repo.tag("v1", second)
    trace = Trace()
    assert find_files("org/name", revision="v1", trace=trace).commit == first
    assert "the hub may be ahead" in trace.find("commit").source  # type: ignore[union-attr]
    shutil.rmtree(cache(tmp_path))
    assert find(revision="v1").commit == second


def test_s1_a_listing_of_several_pages_is_read_to_its_end(hub: LocalHub) -> None:
    hub.page_size = 3
    names = {f"model-{number:05}-of-00010.safetensors": b"x" * number for number in range(1, 11)}
    hub.repo("org/name").commit({"config.json": "{}", **names})
    assert set(find().names) == {"config.json", *names}


def test_s2_case_12_the_tokenizer_comes_from_the_models_commit(hub: LocalHub) -> None:
    from modelbay.args import EngineArgs
    from modelbay.tokenizer.load import tokenizer_files

    repo = hub.repo("org/name")
    first = repo.commit(MODEL)
    second = repo.commit({"tokenizer.json": '{"version": "newer"}'})
    files = find(revision=first)
    for named in ({}, {"tokenizer": "org/name"}):
        args = EngineArgs.create("org/name", revision=first, **named)
        found = tokenizer_files(files, [], args, Trace())
        assert (found.commit, found.path("tokenizer.json").read_text()) == (first, "{}")  # type: ignore[union-attr]
    args = EngineArgs.create("org/name", revision=first, tokenizer_revision="main")
    assert tokenizer_files(files, [], args, Trace()).commit == second


# -- processes at once


def test_two_processes_download_the_same_model_at_once(hub: LocalHub, tmp_path: Path) -> None:
    import time

    commit = hub.repo("org/name").commit(MODEL)
    command = [sys.executable, "-c", DOWNLOAD, str(time.time() + 3), *WANTED]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    expected = [f"{commit} {len(as_bytes(MODEL)[name])}" for name in WANTED]
    for run in runs:
        out, err = run.communicate(timeout=100)
        assert run.returncode == 0, err
        assert out.splitlines() == expected
    left = [path.name for path in cache(tmp_path).rglob("*") if path.name.endswith((".incomplete", ".tmp"))]
    assert left == []
    assert contents(find()) == {name: as_bytes(MODEL)[name] for name in WANTED}


def test_a_process_killed_while_downloading_leaves_nothing_that_is_taken_for_whole(
    hub: LocalHub, tmp_path: Path
) -> None:
    hub.repo("org/name").commit(MODEL)
    script = (
        "import os\n"
        "import huggingface_hub.file_download as module\n"
        "def part(url, temp_file, **kwargs):\n    temp_file.write(b'half'); temp_file.flush(); os._exit(9)\n"
        "module.http_get = part\n"
    ) + DOWNLOAD
    run = subprocess.run([sys.executable, "-c", script, "0", "model.safetensors"], capture_output=True, check=False)
    assert run.returncode == 9
    assert find().fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


# -- connections that break


@pytest.mark.parametrize("after", [0, 1, 150_000, len(WEIGHTS) - 1])
def test_a_connection_cut_anywhere_is_resumed(hub: LocalHub, after: int) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.cut("/cdn/", after=after, times=2)
    assert contents(find())["model.safetensors"] == WEIGHTS


def test_a_connection_that_never_holds_is_an_error_and_leaves_no_truncated_file(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.repo("org/name").commit(MODEL)
    hub.cut("/cdn/", after=0, times=10_000)
    files = find()
    with pytest.raises(ModelbayError) as caught:
        files.fetch(WANTED)
    assert "model.safetensors of org/name" in str(caught.value)
    assert not (files.root / "model.safetensors").exists()
    hub._faults.clear()
    assert contents(find())["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_body_of_another_size_than_was_announced_is_never_kept(hub: LocalHub, name: str) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.alter(name, lambda body: body + b"more", times=1)
    files = find()
    with pytest.raises(SourceError, match=name):
        files.fetch([name])
    assert not (files.root / name).exists()
    assert files.fetch([name])[0].read_bytes() == as_bytes(MODEL)[name]


# -- caches that others made or that cannot be written


def test_s3_a_read_only_cache_serves_and_offline_too(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: None
) -> None:
    """Case 13. As files and folders without write permission; as root also with every write refused."""
    hub.repo("org/name").commit(MODEL)
    find().fetch(WANTED)
    for path in [cache(tmp_path), *cache(tmp_path).rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    before = {path: path.stat().st_mtime_ns for path in cache(tmp_path).rglob("*")}
    for offline in ("", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        assert contents(find()) == {name: as_bytes(MODEL)[name] for name in WANTED}
    assert {path: path.stat().st_mtime_ns for path in cache(tmp_path).rglob("*")} == before


def test_s1_what_huggingface_hub_downloaded_is_found(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was downloaded here is found by huggingface_hub: one cache."""
    from huggingface_hub import hf_hub_download, snapshot_download

    commit = hub.repo("org/name").commit(MODEL)
    folder = CachedRepo.of("org/name").directory.parent
    snapshot_download("org/name", cache_dir=folder, endpoint=hub.url, allow_patterns=WANTED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = find()
    assert (files.kind, files.commit) == ("cache", commit)
    assert contents(files)["model.safetensors"] == WEIGHTS
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    shutil.rmtree(folder)
    find().fetch(["config.json"])
    path = hf_hub_download("org/name", "config.json", cache_dir=folder, local_files_only=True)
    assert Path(path).read_text() == MODEL["config.json"]


def test_s3_private_offline_from_the_cache_needs_no_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/name", private=True, readers=("hf_good",)).commit(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    find().fetch(WANTED)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert contents(find())["model.safetensors"] == WEIGHTS
    assert hub.requests == []


def test_s5_duplicates_and_originals_are_not_downloaded(hub: LocalHub) -> None:
    """What a start fetches: by the load format's own choice."""
    from modelbay.weights.safetensors import Safetensors

    hub.repo("org/name").commit({**MODEL, "pytorch_model.bin": b"again", "consolidated.safetensors": b"again"})
    files = find()
    assert Safetensors().select(files) == ("model.safetensors",)
