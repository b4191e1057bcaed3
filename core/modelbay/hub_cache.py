"""The Hugging Face cache on disk, read without huggingface_hub and without network.

Layout of one repository: ``refs/<revision>`` holds a commit, ``snapshots/<commit>/`` the files fetched so far at it,
``blobs/`` their contents, ``trees/<commit>.json`` (where present) the listing of everything the commit has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from modelbay.small_files import MODEL_LIMIT_BYTES, read_text

COMMIT = re.compile(r"[0-9a-f]{40}")
_TREE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What the hub says about one file: size in bytes, git object id, SHA-256 (only of files in large file storage)."""

    size: int
    oid: str
    sha256: str | None = None


Tree = Mapping[str, FileInfo]


def cache_directory() -> Path:
    """Where huggingface_hub keeps its cache, by the same environment variables in the same order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return _expand(value)
    if home := os.environ.get("HF_HOME"):
        return _expand(home) / "hub"
    return _expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expand(path: str) -> Path:
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def is_safe_name(name: str) -> bool:
    """Whether a file name from elsewhere stays inside the directory it is joined to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not set(name) & {"\\", "\0", ":"}


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """One repository in the cache; it need not exist yet."""

    directory: Path

    @classmethod
    def of(cls, repo_id: str) -> CachedRepo:
        return cls(cache_directory() / ("models--" + repo_id.replace("/", "--")))

    def snapshot(self, commit: str) -> Path:
        return self.directory / "snapshots" / commit

    def blob(self, info: FileInfo) -> Path:
        return self.directory / "blobs" / (info.sha256 or info.oid)

    def commit_of(self, revision: str) -> str | None:
        """The commit that a branch, tag or full commit stood for when it was last resolved; None if unknown."""
        if COMMIT.fullmatch(revision):
            return revision if self.snapshot(revision).is_dir() else None
        if not is_safe_name(revision):
            return None
        try:
            commit = read_text(self.directory / "refs" / revision, encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def revisions(self) -> list[str]:
        """The branches and tags that the cache can resolve."""
        refs = self.directory / "refs"
        return sorted(path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file())

    def snapshot_names(self, commit: str) -> tuple[str, ...]:
        """The files of a commit that are on disk."""
        root = self.snapshot(commit)
        return tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()))

    def read_tree(self, commit: str) -> dict[str, FileInfo] | None:
        """The full listing of a commit, None if nobody stored it."""
        try:
            data = json.loads(read_text(self.directory / "trees" / f"{commit}.json", limit=MODEL_LIMIT_BYTES))
            if data["format_version"] != _TREE_FORMAT:
                return None
            return {
                name: FileInfo(entry["size"], entry["blob_id"], entry.get("lfs_sha256"))
                for name, entry in data["files"].items()
                if is_safe_name(name)
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write_tree(self, commit: str, tree: Tree) -> None:
        """Remember a listing, in the form in which huggingface_hub stores it. A read-only cache is left alone."""
        files = {}
        for name, info in tree.items():
            files[name] = {"size": info.size, "blob_id": info.oid}
            if info.sha256:
                files[name] |= {"lfs_sha256": info.sha256, "lfs_size": info.size}
        content = json.dumps({"format_version": _TREE_FORMAT, "files": files}, indent=1)
        _write_if_possible(self.directory / "trees" / f"{commit}.json", content)

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember what a branch or tag stood for. A read-only cache is left alone."""
        if not COMMIT.fullmatch(revision) and is_safe_name(revision):
            _write_if_possible(self.directory / "refs" / revision, commit)


def _write_if_possible(path: Path, content: str) -> None:
    """Write atomically: a reader sees the old content or the new one."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
