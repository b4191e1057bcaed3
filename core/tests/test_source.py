"""BEHAVIOUR S1-S5: local paths, the cache, the hub, and what is said when one of them fails."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest

from modelbay.errors import (
    AuthenticationError,
    ConfigError,
    GatedModelError,
    ModelbayError,
    ModelNotFoundError,
    NotAModelError,
    OfflineError,
    RevisionNotFoundError,
    SourceError,
    UsageError,
)
from modelbay.source import ModelFiles, find_files
from modelbay.trace import Trace
from modelbay_testing.hub import LocalHub

CONFIG = '{"model_type": "llama"}'
WEIGHTS = bytes(range(256)) * 40
MODEL = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": WEIGHTS}


def find(reference: str | Path, **kwargs: object) -> ModelFiles:
    return find_files(str(reference), trace=Trace(), **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    root = tmp_path / "my.model-v1.5"
    for name in (
        "config.json",
        "1_Pooling/config.json",
        "original/model.safetensors",
        ".git/config",
        "model.safetensors",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(CONFIG)
    return root


def cache_of(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


# S1: local


def test_s1_every_spelling_of_a_local_directory_is_the_same_model(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(model_dir)
    monkeypatch.chdir(tmp_path)
    name = model_dir.name
    relative = [name, f"./{name}", f"{name}/", f"{name}/../{name}", "link"]
    found = [find(reference) for reference in (str(model_dir), f"{model_dir}/", *relative)]
    monkeypatch.chdir(model_dir)
    found += [find("."), find("./"), find("1_Pooling/..")]
    assert {files.root for files in found} == {model_dir.resolve()}
    assert {files.names for files in found} == {found[0].names}
    assert all(files.kind == "local" and files.commit is None for files in found)


def test_s1_a_home_path_is_expanded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert find(f"~/{model_dir.name}").root == model_dir


def test_s1_local_needs_no_network_no_cache_and_writes_nothing(hub: LocalHub, model_dir: Path, tmp_path: Path) -> None:
    """Case 13."""
    before = sorted(tmp_path.rglob("*"))
    files = find(model_dir)
    assert files.read_json("config.json") == {"model_type": "llama"}
    assert files.fetch(["model.safetensors"]) == [model_dir / "model.safetensors"]
    assert hub.requests == []
    assert sorted(tmp_path.rglob("*")) == before


def test_s1_listing_has_sub_folders_and_no_hidden_ones(model_dir: Path) -> None:
    assert find(model_dir).names == (
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "original/model.safetensors",
    )


def test_s1_a_local_directory_wins_over_the_hub_id_and_the_trace_says_so(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/name").commit(MODEL)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/config.json").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    trace = Trace()
    assert find_files("org/name", trace=trace).kind == "local"
    decision = trace.find("files")
    assert decision is not None
    assert [rejected.option for rejected in decision.rejected] == ["hub: org/name"]
    assert hub.requests == []


def test_s1_an_empty_directory_that_hides_a_hub_id_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotAModelError, match="a local directory of this name wins"):
        find("org/name")


def test_s1_a_single_file_is_its_directory_with_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/abc").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blobs/abc")
    (tmp_path / "config.json").write_text(CONFIG)
    files = find(tmp_path / "model.gguf", file_suffixes=(".gguf",))
    assert (files.root, files.entry, files.names) == (tmp_path, "model.gguf", ("model.gguf",))
    monkeypatch.chdir(tmp_path)
    assert find("model.gguf", file_suffixes=(".gguf",)).root == tmp_path


def test_s1_one_part_of_a_split_file_brings_the_other_parts(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "m-00001-of-00003.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    files = find(tmp_path / "m-00001-of-00002.gguf", file_suffixes=(".gguf",))
    assert files.names == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def test_s1_another_file_names_the_directory_to_give(model_dir: Path) -> None:
    with pytest.raises(NotAModelError, match=f"Give its directory: {model_dir}"):
        find(model_dir / "config.json", file_suffixes=(".gguf",))


@pytest.mark.parametrize("reference", ["./nope", "/no/such/place", "~/nope-nope", "a/b/c", "nope.gguf", "org/name/"])
def test_s1_what_can_only_be_a_path_never_asks_the_hub(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no path"):
        find(reference, file_suffixes=(".gguf",))
    assert hub.requests == []


def test_s1_a_missing_path_names_the_nearest_sibling(model_dir: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"Did you mean {model_dir}"):
        find(model_dir.parent / "my.model-v15")


def test_s1_a_broken_link_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match=r"is a link to .*gone"):
        find(tmp_path / "link")


def test_s1_folders_that_are_links_are_listed(model_dir: Path, tmp_path: Path) -> None:
    shutil.move(model_dir / "1_Pooling", tmp_path / "pooling")
    (tmp_path / "pooling/deep/er").mkdir(parents=True)
    (tmp_path / "pooling/deep/er/x.json").write_text("{}")
    (tmp_path / "pooling/__pycache__").mkdir()
    (tmp_path / "pooling/__pycache__/x.pyc").write_text("")
    (tmp_path / "pooling/.git").mkdir()
    (tmp_path / "pooling/.git/x").write_text("")
    os.mkfifo(tmp_path / "pooling/pipe")
    (model_dir / "1_Pooling").symlink_to("../pooling")
    (model_dir / "original/again").symlink_to(tmp_path / "pooling")
    (model_dir / "alone").symlink_to("alone")
    (model_dir / ".hidden").symlink_to(tmp_path / "pooling")
    inside = ["1_Pooling/config.json", "1_Pooling/deep/er/x.json"]
    again = [name.replace("1_Pooling", "original/again") for name in inside]
    files = find(model_dir)
    assert [name for name in files.names if "/" in name] == [*inside, *again, "original/model.safetensors"]
    assert files.read_json("1_Pooling/config.json") == {"model_type": "llama"}


def test_s1_circles_of_links_end(model_dir: Path, tmp_path: Path) -> None:
    """To the model, to what lies around it, and between folders that are not below each other."""
    before = find(model_dir).names
    for name, target in (("self", "."), ("up", ".."), ("root", "/"), ("original/up", model_dir)):
        (model_dir / name).symlink_to(target)
    assert find(model_dir).names == before
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "to").symlink_to(tmp_path / other)
        (tmp_path / name / "config.json").write_text(name)
    (model_dir / "a").symlink_to(tmp_path / "a")
    assert {"a/config.json", "a/to/config.json"} == {*find(model_dir).names} - {*before}


def test_s1_of_what_a_link_leads_to_no_more_is_listed_than_a_model_has(model_dir: Path, tmp_path: Path) -> None:
    """Nearest first, so what a model has is among it."""
    before = len(find(model_dir).names)
    deep = tmp_path / "disk"
    for level in range(7):
        deep.mkdir()
        for number in range(2000):
            (deep / f"{number:04}").touch()
        (deep / "zz.json").touch()
        deep = deep / f"level{level}"
    (model_dir / "disk").symlink_to(tmp_path / "disk")
    names = find(model_dir).names
    assert "disk/zz.json" in names
    assert 2000 < len(names) - before <= 10_000


def test_s1_an_empty_reference_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="empty"):
        find("  ")


def test_a_revision_of_a_local_path_is_warned_about(model_dir: Path) -> None:
    trace = Trace()
    find_files(str(model_dir), revision="v1", trace=trace)
    assert "'v1'" in trace.warnings()[0].source


# S1: cache, then hub


def test_s1_the_second_start_comes_from_the_cache_without_network(hub: LocalHub) -> None:
    """Case 13."""
    commit = hub.repo("org/name").commit(MODEL)
    first = find("org/name")
    first.fetch(["config.json"])
    assert (first.kind, first.commit, first.names) == ("hub", commit, tuple(sorted(MODEL)))
    hub.requests.clear()
    trace = Trace()
    again = find_files("org/name", trace=trace)
    assert again.read_json("config.json") == {"model_type": "llama"}
    assert (again.kind, again.commit, again.names) == ("cache", commit, tuple(sorted(MODEL)))
    assert hub.requests == []
    assert "the hub may be ahead" in trace.find("commit").source  # type: ignore[union-attr]


def test_s1_a_cache_that_others_filled_needs_no_listing_when_it_holds_a_whole_model(
    hub: LocalHub, tmp_path: Path
) -> None:
    commit = hub.repo("org/name").commit(MODEL)
    find("org/name").fetch(MODEL)
    shutil.rmtree(cache_of(tmp_path) / "models--org--name/trees")
    hub.requests.clear()
    files = find("org/name")
    assert (files.kind, files.commit, set(files.names)) == ("cache", commit, set(MODEL))
    assert hub.requests == []


def test_s1_a_partial_cache_without_a_listing_asks_for_it_at_the_cached_commit(hub: LocalHub, tmp_path: Path) -> None:
    repo = hub.repo("org/name")
    old = repo.commit(MODEL)
    find("org/name").fetch(["config.json"])
    shutil.rmtree(cache_of(tmp_path) / "models--org--name/trees")
    repo.commit({"model.safetensors": b"new", "new.json": "{}"})
    files = find("org/name")
    assert (files.commit, set(files.names)) == (old, set(MODEL))
    assert files.fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


def test_model_files_travel_to_other_processes(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    hub.repo("org/name").commit(MODEL)
    files = find("org/name")
    data = pickle.dumps(files)
    assert b"hf_good" not in data
    assert pickle.loads(data).fetch(["config.json"]) == files.fetch(["config.json"])


# S2


def test_s2_every_file_comes_from_the_commit_that_was_resolved_first(hub: LocalHub) -> None:
    repo = hub.repo("org/name")
    old = repo.commit(MODEL)
    files = find("org/name")
    repo.commit({"config.json": '{"model_type": "other"}', "model.safetensors": b"other"})
    assert files.commit == old
    assert files.read_json("config.json") == {"model_type": "llama"}
    assert files.fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


def test_s2_branches_tags_and_commits_resolve(hub: LocalHub) -> None:
    repo = hub.repo("org/name")
    first = repo.commit(MODEL)
    repo.tag("v1.0", first)
    second = repo.commit({"config.json": '{"model_type": "qwen2"}'})
    branch = repo.commit({"config.json": '{"model_type": "gemma"}'}, branch="feature/x")
    assert find("org/name").commit == second
    assert find("org/name", revision="v1.0").commit == first
    assert find("org/name", revision="feature/x").commit == branch
    assert find("org/name", revision=first).commit == first
    for revision, model_type in (("v1.0", "llama"), ("feature/x", "gemma"), (None, "qwen2"), (first, "llama")):
        for _ in ("hub", "cache"):
            assert find("org/name", revision=revision).read_json("config.json") == {"model_type": model_type}


@pytest.mark.parametrize("revision", ["nope", "0" * 40, "../../refs/main"])
def test_s2_a_revision_that_does_not_exist_is_never_main(hub: LocalHub, revision: str) -> None:
    """Case 12."""
    hub.repo("org/name").commit(MODEL)
    find("org/name").fetch(["config.json"])
    with pytest.raises(RevisionNotFoundError, match=f"org/name has no revision '{revision}'"):
        find("org/name", revision=revision)


# S3


@pytest.mark.parametrize("value", ["hf_good", " hf_good\n", "hf_good\r\n"])
def test_s3_the_token_is_stripped(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Case 14."""
    hub.repo("org/private", private=True, readers=("hf_good",)).commit(MODEL)
    monkeypatch.setenv("HF_TOKEN", value)
    find("org/private").fetch(MODEL)
    assert {request.token for request in hub.requests if not request.path.startswith("/cdn/")} == {"hf_good"}


@pytest.mark.parametrize("value", ["", "  \n"])
def test_s3_an_empty_token_is_anonymous(hub: LocalHub, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Case 14."""
    hub.repo("org/name").commit(MODEL)
    monkeypatch.setenv("HF_TOKEN", value)
    find("org/name").fetch(MODEL)
    assert {request.token for request in hub.requests} == {None}


@pytest.mark.parametrize("value", ["hf_se\ncret", "hf_sécret"])
def test_s3_a_token_that_cannot_be_one_is_refused_and_not_printed(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    with pytest.raises(UsageError) as caught:
        find("org/name")
    assert "cret" not in str(caught.value)
    assert hub.requests == []


def test_s3_offline_makes_no_call(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 13."""
    hub.repo("org/name").commit(MODEL)
    find("org/name").fetch(MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert len(find("org/name").fetch(MODEL)) == 3
    with pytest.raises(OfflineError, match=r"org/other .*HF_HUB_OFFLINE is set, and the cache at .* does not have it"):
        find("org/other")
    with pytest.raises(OfflineError, match="'v2' cannot be had: HF_HUB_OFFLINE is set, and the cache has it at main"):
        find("org/name", revision="v2")
    assert hub.requests == []


@pytest.mark.parametrize("listing", [True, False])
def test_s3_a_partly_cached_model_offline_lists_what_is_missing(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: bool
) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.dumps({"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}})
    hub.repo("org/name").commit(
        {"config.json": CONFIG, "model.safetensors.index.json": index, **dict.fromkeys(shards, WEIGHTS)}
    )
    find("org/name").fetch(["config.json", "model.safetensors.index.json", shards[1]])
    if not listing:
        shutil.rmtree(cache_of(tmp_path) / "models--org--name/trees")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    files = find("org/name")
    assert files.has(shards[0])
    assert files.complete is listing
    with pytest.raises(OfflineError, match=f"missing: {shards[0]}, {shards[2]}\\."):
        files.fetch(shards)
    assert hub.requests == []


def test_s3_an_unreachable_hub_lists_what_is_missing_too(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/name").commit(MODEL)
    find("org/name").fetch(["config.json"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OfflineError, match=r"cannot reach http://127.0.0.1:9 .*missing: model.safetensors\."):
        find("org/name").fetch(["model.safetensors"])


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_s3_a_read_only_cache_works(hub: LocalHub, tmp_path: Path) -> None:
    """Case 13."""
    hub.repo("org/name").commit({"README.md": "", **MODEL})
    find("org/name").fetch(MODEL)
    folders = [path for path in (cache_of(tmp_path), *cache_of(tmp_path).rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        files = find("org/name")
        assert files.read_json("config.json") == {"model_type": "llama"}
        with pytest.raises(SourceError, match="is not writable"):
            files.fetch(["README.md"])
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)


def test_s3_a_cache_that_cannot_be_written_says_so_when_a_file_is_needed(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/name").commit(MODEL)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("huggingface_hub.file_download._download_to_tmp_and_move", refuse)
    with pytest.raises(SourceError, match=r"config.json of org/name cannot be stored: .* is not writable"):
        find("org/name").fetch(["config.json"])


def test_s3_a_full_cache_is_only_read(hub: LocalHub, tmp_path: Path) -> None:
    hub.repo("org/name").commit(MODEL)
    find("org/name").fetch(MODEL)
    before = {path: path.lstat().st_mtime_ns for path in cache_of(tmp_path).rglob("*")}
    find("org/name").fetch(MODEL)
    assert {path: path.lstat().st_mtime_ns for path in cache_of(tmp_path).rglob("*")} == before


# S4


def test_s4_a_bad_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14."""
    hub.repo("org/name").commit(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_expired_secret")
    with pytest.raises(AuthenticationError, match="does not accept the token in HF_TOKEN") as caught:
        find("org/name")
    assert "hf_expired_secret" not in str(caught.value)


def test_s4_a_private_or_absent_model_without_a_token(hub: LocalHub) -> None:
    hub.repo("org/private", private=True, readers=("hf_good",)).commit(MODEL)
    with pytest.raises(AuthenticationError, match=r"org/private is not a public model.*set HF_TOKEN"):
        find("org/private")


def test_s4_a_gated_model(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14."""
    hub.repo("org/gated", gated=True).commit(MODEL)
    with pytest.raises(AuthenticationError, match=r"gated and no valid token was sent.*Accept its terms"):
        find("org/gated").read_json("config.json")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(GatedModelError, match=r"not been granted access.*Ask for access"):
        find("org/gated").read_json("config.json")


def test_s4_not_found(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14."""
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(ModelNotFoundError, match="neither a path here nor a model on"):
        find("org/nope")


def test_s4_no_network(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OfflineError, match=r"cannot reach http://127.0.0.1:9.*Check the network"):
        find("org/name")


def test_s4_a_hub_in_trouble(hub: LocalHub) -> None:
    hub.fail("/api/models/", 503)
    with pytest.raises(SourceError, match=r"answered 503 for org/name. Try again later"):
        find("org/name")


def test_s4_a_passing_trouble_is_sat_out(hub: LocalHub) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.fail("/revision/", 502, times=1)
    assert find("org/name").has("config.json")


def test_s4_no_config_json_on_the_hub(hub: LocalHub) -> None:
    """Case 14."""
    hub.repo("org/lora").commit({"adapter_config.json": "{}"})
    with pytest.raises(NotAModelError, match=r"no config.json at main.*adapter"):
        find("org/lora")
    hub.repo("org/ggufs").commit({"m.gguf": b"GGUF"})
    assert find("org/ggufs", file_suffixes=(".gguf",)).names == ("m.gguf",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "is empty of files.*Give the directory that holds"),
        (["README.md", "model.safetensors"], "it holds README.md, model.safetensors"),
        (["adapter_config.json"], "merge it into its base model"),
        (["checkpoint-100/config.json"], "Did you mean .*checkpoint-100"),
        (["snapshots/abc/config.json"], "Did you mean .*snapshots/abc"),
    ],
)
def test_s4_a_directory_without_config_json(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(NotAModelError, match=message):
        find(tmp_path, file_suffixes=(".gguf",))


def test_s4_every_message_is_one_line(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14."""
    messages = []
    for endpoint, reference in ((hub.url, "org/nope"), ("http://127.0.0.1:9", "org/nope"), (hub.url, str(tmp_path))):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(ModelbayError) as caught:
            find(reference)
        messages.append(str(caught.value))
        assert caught.value.hint
    assert len(set(messages)) == 3
    assert not any("\n" in message for message in messages)


# S5


def test_s5_only_what_is_asked_for_is_downloaded(hub: LocalHub) -> None:
    hub.repo("org/name").commit({**MODEL, "pytorch_model.bin": b"dup", "original/model.safetensors": b"dup"})
    files = find("org/name")
    assert hub.downloads() == []
    files.fetch(files.match("*.safetensors"))
    assert hub.downloads() == ["model.safetensors"]
    files.read_json("config.json")
    files.read_json("config.json")
    assert files.read_json("generation_config.json") is None
    assert hub.downloads() == ["model.safetensors", "config.json"]


def test_s5_patterns_stay_within_one_folder_and_keep_listing_order(model_dir: Path) -> None:
    files = find(model_dir)
    assert files.match("*.safetensors", "config.json") == ("config.json", "model.safetensors")
    assert files.match("*/config.json", "original/*") == ("1_Pooling/config.json", "original/model.safetensors")


def test_s5_sizes_are_known_without_downloading(hub: LocalHub) -> None:
    hub.repo("org/name").commit(MODEL)
    files = find("org/name")
    assert (files.size("model.safetensors"), files.size("nope")) == (len(WEIGHTS), None)
    assert hub.downloads() == []


def test_s5_progress_is_shown(
    hub: LocalHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/name").commit(MODEL)
    monkeypatch.setenv("TQDM_POSITION", "-1")  # shows bars without a terminal
    find("org/name").fetch(["model.safetensors"])
    assert "model.safetensors: 100%" in capsys.readouterr().err


# downloads that go wrong


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((cache_of(tmp_path) / "models--org--name").glob("blobs/*"))


def test_a_cut_connection_is_resumed(hub: LocalHub) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.cut("/cdn/", after=1000)
    assert find("org/name").fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


def test_a_corrupt_body_of_the_right_size_is_refused_and_removed(hub: LocalHub, tmp_path: Path) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.alter("/cdn/", lambda body: b"X" + body[1:], times=1)
    files = find("org/name")
    with pytest.raises(SourceError, match=r"model.safetensors from org/name has another SHA-256.*Run again"):
        files.fetch(["model.safetensors"])
    assert blobs(tmp_path) == []
    assert files.fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


def test_a_cached_file_of_the_wrong_size_is_fetched_again(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("org/name").commit(MODEL)
    path = find("org/name").fetch(["model.safetensors"])[0]
    path.resolve().write_bytes(WEIGHTS[:100])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match=r"missing: model.safetensors"):
        find("org/name").fetch(["model.safetensors"])
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert find("org/name").fetch(["model.safetensors"])[0].read_bytes() == WEIGHTS


def test_a_disk_too_small_is_found_before_the_first_byte(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/name").commit(MODEL)
    files = find("org/name")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 95, 5))
    with pytest.raises(SourceError, match=rf"needs 10,240 bytes, the disk of {cache_of(tmp_path)} has 5 free"):
        files.fetch(["model.safetensors"])
    assert hub.downloads() == []


def test_a_disk_that_fills_up_leaves_no_truncated_file(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo("org/name").commit(MODEL)

    def full(url: str, temp_file: object, **kwargs: object) -> None:
        temp_file.write(b"some")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(
        SourceError, match=rf"disk is full: model.safetensors of org/name \(10,240 bytes\).*{cache_of(tmp_path)}"
    ):
        find("org/name").fetch(["model.safetensors"])
    assert blobs(tmp_path) == []


def test_the_first_error_ends_the_other_transfers(hub: LocalHub, tmp_path: Path) -> None:
    names = [f"{number}.safetensors" for number in range(20)]
    hub.repo("org/name").commit({"config.json": CONFIG} | {name: name.encode() * 100 for name in names})
    hub.fail("0.safetensors", 404)
    with pytest.raises(SourceError):
        find("org/name").fetch(names)
    assert not list(cache_of(tmp_path).rglob("*.incomplete"))


@pytest.mark.parametrize("name", ["../../../evil.json", "/etc/evil.json", "a/../../evil"])
def test_a_listing_that_leaves_the_cache_is_refused(hub: LocalHub, name: str) -> None:
    hub.repo("org/name").commit(MODEL)
    hub.extra_tree_entries.append({"type": "file", "path": name, "size": 1, "oid": "0" * 40})
    with pytest.raises(SourceError, match="would leave the cache"):
        find("org/name")


def test_fetch_refuses_what_the_repository_does_not_have(hub: LocalHub, model_dir: Path) -> None:
    with pytest.raises(SourceError, match=r"has no file nope.bin"):
        find(model_dir).fetch(["config.json", "nope.bin"])
    with pytest.raises(SourceError, match="has no file"):
        find(model_dir).fetch(["../secret"])


# read_json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": ', r"config.json, line 2, column 7: not JSON: .*may be truncated"),
        (b"", r"config.json, line 1, column 1: not JSON"),
        (b"[1, 2]", r"config.json, line 1, column 1: a JSON object is needed, found list"),
        (b'{"a": "\xff"}', r"config.json: not UTF-8 text \(byte 7\)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer: run git lfs pull"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_read_json_names_file_line_and_column(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        find(tmp_path).read_json("config.json")


def test_read_json_takes_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    assert find(tmp_path).read_json("config.json") == {}
