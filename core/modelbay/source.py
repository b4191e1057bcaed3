"""From a reference to files: a local path, the Hugging Face cache, or the hub, at one commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from modelbay.trace import Trace


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one repository at one commit.

    Args:
        reference: what the user wrote.
        kind: where the files come from.
        root: the directory (local: the directory itself; else the snapshot folder of the commit in the cache).
        names: every file name in it, relative, "/"-separated, whether already on disk or not.
        repo_id: ``org/name`` for hub and cache, None for local.
        revision: what was asked for; commit: the 40 hex digits it was resolved to (None for local).
        entry: for a reference that is one file (``model.gguf``): its name in ``root``.
    """

    reference: str
    kind: Literal["local", "cache", "hub"]
    root: Path
    names: tuple[str, ...]
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    entry: str | None = None

    def has(self, name: str) -> bool:
        return name in self.names

    def match(self, *patterns: str) -> tuple[str, ...]:
        """Names that match any of the ``fnmatch`` patterns, in listing order."""
        raise NotImplementedError

    def fetch(self, names: Iterable[str]) -> list[Path]:
        """Local paths of these files, downloading (with progress) what is not there yet, at `commit`."""
        raise NotImplementedError

    def path(self, name: str) -> Path | None:
        """The local path of one file, fetched if needed; None if the repository does not have it."""
        raise NotImplementedError

    def read_json(self, name: str) -> dict | None:
        """A small JSON object file, None if absent; errors name the file, line and column."""
        raise NotImplementedError


def find_files(
    reference: str,
    *,
    revision: str | None = None,
    file_suffixes: Sequence[str] = (),
    trace: Trace,
) -> ModelFiles:
    """Turn a reference into `ModelFiles` (BEHAVIOUR S1-S5).

    ``file_suffixes``: endings for which a reference may be a single file (".gguf").
    """
    raise NotImplementedError
