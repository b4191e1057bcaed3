"""From a reference to files: a local path, the Hugging Face cache, or the hub, at one commit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from modelbay import hub, local_files
from modelbay.errors import ConfigError, ModelNotFoundError, NotAModelError, OfflineError, SourceError, UsageError
from modelbay.hub_cache import CachedRepo, Tree, is_safe_name
from modelbay.small_files import MODEL_LIMIT_BYTES, read_text
from modelbay.trace import Rejected, Trace

_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_DEFAULT_BRANCH = "main"
_LONGEST_PATH, _LONGEST_NAME = 4096, 255  # bytes; what the file systems of this world take
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one repository at one commit. Picklable; holds no token and no connection.

    Args:
        reference: what the user wrote.
        kind: where the files come from.
        root: the directory (local: the directory itself; else the snapshot folder of the commit in the cache).
        names: every file name in it, relative, "/"-separated, whether already on disk or not.
        repo_id: ``org/name`` for hub and cache, None for local.
        revision: what was asked for; commit: the 40 hex digits it was resolved to (None for local).
        entry: for a reference that is one file (``model.gguf``): its name in ``root``.
        complete: False if only the cached part of the listing is known, because the hub could not be asked.
        tree: what the hub's listing says about each file; empty if there is none.
    """

    reference: str
    kind: Literal["local", "cache", "hub"]
    root: Path
    names: tuple[str, ...]
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    entry: str | None = None
    complete: bool = True
    tree: Tree = field(default_factory=dict, repr=False, compare=False)

    def has(self, name: str) -> bool:
        return name in self.names

    def match(self, *patterns: str) -> tuple[str, ...]:
        """Names that match any of the patterns, in listing order.

        As in a shell, a ``*`` stays within one folder: ``*.safetensors`` leaves ``original/`` alone.
        """
        return tuple(name for name in self.names if any(_matches(name, pattern) for pattern in patterns))

    def size(self, name: str) -> int | None:
        """Bytes of a file, without fetching it; None if neither the disk nor the listing knows."""
        if (self.root / name).is_file():
            return (self.root / name).stat().st_size
        return self.tree[name].size if name in self.tree else None

    def fetch(self, names: Iterable[str]) -> list[Path]:
        """Local paths of these files, downloading (with progress) what is not there yet, at `commit`.

        Raises:
            OfflineError: no network allowed or to be had; lists the missing files.
            SourceError: the repository has no such file, or the download failed.
        """
        wanted = list(dict.fromkeys(names))
        known = set(self.names)
        unknown = [name for name in wanted if name not in known]
        if not all(is_safe_name(name) for name in wanted) or (unknown and self.complete):
            raise SourceError(f"{self.reference} has no file {', '.join(unknown or wanted)}.")
        missing = [name for name in wanted if not self._on_disk(name)]
        if missing and self.kind != "local":
            self._download(missing)
        return [self.root / name for name in wanted]

    def path(self, name: str) -> Path | None:
        """The local path of one file, fetched if needed; None if the repository does not have it."""
        return self.fetch([name])[0] if self.has(name) else None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A small JSON object file, None if absent; errors name the file, line and column."""
        path = self.path(name)
        return None if path is None else _read_json_object(path)

    def _on_disk(self, name: str) -> bool:
        """Whether the file is there, whole as far as its size tells."""
        path = self.root / name
        return path.is_file() and (name not in self.tree or path.stat().st_size == self.tree[name].size)

    def _download(self, missing: Sequence[str]) -> None:
        assert self.repo_id is not None
        assert self.commit is not None
        if hub.is_offline():
            raise _incomplete(self.reference, missing, "and HF_HUB_OFFLINE is set")
        cached = CachedRepo(self.root.parent.parent)
        if self.kind == "cache":
            # The cache answered without network so far: learn now, in one request, whether the hub does too.
            try:
                hub.resolve_commit(self.repo_id, self.commit)
            except OfflineError as error:
                raise _incomplete(self.reference, missing, f"and {error.message.rstrip('.')}") from error
        hub.download(self.repo_id, cached, self.commit, missing, self.tree)
        if self.revision is not None:
            cached.write_ref(self.revision, self.commit)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, encoding="utf-8-sig", limit=MODEL_LIMIT_BYTES)
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}.", hint=_json_hint(text)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}).", hint="Download the file again.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be a config.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{path}: not JSON that can be read: {error}.") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line 1, column 1: a JSON object is needed, found {type(value).__name__}.")
    return value


def _json_hint(text: str) -> str:
    if text.startswith("version https://git-lfs"):
        return "It is a Git LFS pointer: run git lfs pull."
    return "The file may be truncated: download it again." if text.count("{") > text.count("}") else "Correct the file."


def _incomplete(reference: str, missing: Sequence[str], why: str) -> OfflineError:
    listed = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
    return OfflineError(
        f"{reference} is only partly in the cache, {why}; missing: {listed}.",
        hint="Run once with network, or copy the missing files into the cache.",
    )


def find_files(
    reference: str,
    *,
    revision: str | None = None,
    file_suffixes: Sequence[str] = (),
    trace: Trace,
) -> ModelFiles:
    """Turn a reference into `ModelFiles` (BEHAVIOUR S1-S5).

    ``file_suffixes``: endings for which a reference may be a single file (".gguf").

    Raises:
        NotAModelError: files, but no config.json and none that ``file_suffixes`` says carries its own.
        ModelNotFoundError, RevisionNotFoundError, AuthenticationError, GatedModelError, OfflineError: see each.
    """
    files = find_repository(reference, revision=revision, file_suffixes=file_suffixes, trace=trace)
    if files.entry is None and not _has_config(files.names, file_suffixes):
        raise _not_a_model(files, file_suffixes)
    return files


def find_repository(
    reference: str,
    *,
    revision: str | None = None,
    file_suffixes: Sequence[str] = (),
    local: bool = True,
    trace: Trace,
) -> ModelFiles:
    """Like `find_files` for what need not be a model, as a repository of code or a tokenizer.

    ``local=False`` looks in the cache and on the hub only.
    """
    reference = os.fspath(reference)
    if not reference.strip():
        raise UsageError("the model reference is empty.", hint="Give a directory, a file, or a hub id (org/name).")
    encoded = reference.encode(errors="surrogatepass")
    if len(encoded) >= _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
        raise ModelNotFoundError(f"a reference of {len(reference)} characters is neither a path nor a hub id.")
    path = Path(os.path.expanduser(reference))
    if local and os.path.exists(path):
        return _local(reference, path, revision, file_suffixes, trace)
    if not _REPO_ID.fullmatch(reference) or reference.startswith((".", "-")) or _is_single(reference, file_suffixes):
        raise local_files.missing_path(reference, path)
    revision = revision or _DEFAULT_BRANCH
    return _from_cache(reference, revision, file_suffixes, trace) or _from_hub(reference, revision, trace)


def _local(reference: str, path: Path, revision: str | None, file_suffixes: Sequence[str], trace: Trace) -> ModelFiles:
    if path.is_file():
        # The parent is resolved, the file is not: a link's own name carries the suffix.
        root, entry = path.parent.resolve(), path.name
        if not _is_single(entry, file_suffixes):
            raise local_files.not_a_model_file(path, file_suffixes)
        names = local_files.list_shards(root, entry)
    else:
        root, entry, names = path.resolve(), None, local_files.list_directory(path.resolve(), file_suffixes)
    like_hub_id = _REPO_ID.fullmatch(reference) and not reference.startswith(".")
    rejected = (Rejected(f"hub: {reference}", "a local path of this name exists, and wins"),) if like_hub_id else ()
    trace.decide("source", "files", str(root / (entry or "")), "local path", rejected=rejected)
    if revision is not None:
        trace.warn("source", "revision", None, f"{reference} is a local path: revision {revision!r} has no meaning")
    return ModelFiles(reference, "local", root, names, entry=entry)


def _from_cache(repo_id: str, revision: str, file_suffixes: Sequence[str], trace: Trace) -> ModelFiles | None:
    """The cached commit, if there is one to start from. No network, unless its listing has to be asked for."""
    cached = CachedRepo.of(repo_id)
    commit = cached.commit_of(revision)
    if commit is None:
        return None
    root = cached.snapshot(commit)
    tree: Tree | None = cached.read_tree(commit)
    on_disk = cached.snapshot_names(commit)
    if not on_disk:
        return None
    names, complete = on_disk, True
    if tree is None:
        names = tuple(sorted({*on_disk, *_shards_of_indexes(root, on_disk)}))
        complete = _looks_complete(names, set(on_disk), file_suffixes)
        if not complete and not hub.is_offline():
            tree = _ask_for_tree(repo_id, commit, trace)
            if tree is not None:
                cached.write_tree(commit, tree)
    if tree is not None:
        names, complete = tuple(tree), True
    pinned = commit == revision
    note = "pinned" if pinned else f"what {revision!r} was when it was last downloaded; the hub may be ahead"
    trace.decide("source", "files", str(root), f"cache, {repo_id}")
    trace.decide("source", "commit", commit, note)
    return ModelFiles(repo_id, "cache", root, names, repo_id, revision, commit, complete=complete, tree=tree or {})


def _ask_for_tree(repo_id: str, commit: str, trace: Trace) -> Tree | None:
    """The hub's listing for a cached commit; without it the cached files have to do, and the trace says so."""
    try:
        return hub.list_tree(repo_id, commit)
    except SourceError as error:
        trace.warn("source", "listing", "cached files only", f"the hub could not be asked: {error.message}")
        return None


def _from_hub(repo_id: str, revision: str, trace: Trace) -> ModelFiles:
    cached = CachedRepo.of(repo_id)
    if hub.is_offline():
        known = ", ".join(name for name in cached.revisions() if name != revision)
        found = f"the cache has it at {known}" if known else f"the cache at {cached.directory.parent} does not have it"
        raise OfflineError(
            f"{repo_id} at revision {revision!r} cannot be had: HF_HUB_OFFLINE is set, and {found}.",
            hint="Unset HF_HUB_OFFLINE to download it, or give a local directory.",
        )
    commit = hub.resolve_commit(repo_id, revision)
    tree = cached.read_tree(commit)
    if tree is None:
        tree = hub.list_tree(repo_id, commit)
        cached.write_tree(commit, tree)
    trace.decide("source", "files", str(cached.snapshot(commit)), f"hub, {repo_id}")
    trace.decide("source", "commit", commit, f"the hub, for revision {revision!r}")
    return ModelFiles(repo_id, "hub", cached.snapshot(commit), tuple(tree), repo_id, revision, commit, tree=tree)


def _shards_of_indexes(root: Path, names: Sequence[str]) -> set[str]:
    """File names that the cached index files list: they belong to the commit, on disk or not."""
    shards: set[str] = set()
    for name in names:
        if name.endswith(".index.json") and "/" not in name:
            weight_map = _read_json_object(root / name).get("weight_map")
            if isinstance(weight_map, dict):
                shards |= {shard for shard in weight_map.values() if isinstance(shard, str) and is_safe_name(shard)}
    return shards


def _is_single(name: str, file_suffixes: Sequence[str]) -> bool:
    """Whether a file of this name is a model by itself."""
    return name.endswith(tuple(file_suffixes))


def _looks_complete(names: Sequence[str], on_disk: set[str], file_suffixes: Sequence[str]) -> bool:
    """Whether a cached snapshot without a listing seems to hold a whole model: config, weights and a tokenizer."""
    if any(_is_single(name, file_suffixes) for name in on_disk):
        return True
    weights = any(name.endswith(_WEIGHT_SUFFIXES) for name in on_disk)
    tokenizer = any(name in on_disk for name in _TOKENIZER_FILES)
    return "config.json" in on_disk and weights and tokenizer and on_disk >= set(names)


def _has_config(names: Sequence[str], file_suffixes: Sequence[str]) -> bool:
    return "config.json" in names or any(_is_single(name, file_suffixes) for name in names)


def _not_a_model(files: ModelFiles, file_suffixes: Sequence[str]) -> SourceError:
    if files.kind == "local":
        return local_files.not_a_model_directory(files.reference, files.root, files.names, file_suffixes)
    if not files.complete:
        return _incomplete(files.reference, ["config.json"], "and the hub could not be asked")
    return NotAModelError(
        f"{files.reference} has no config.json at {files.revision}, so it is not a model that can be run.",
        hint=local_files.next_step(files.names) or "Check the hub id and the revision.",
    )
