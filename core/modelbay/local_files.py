"""Listing local directories, and what to say when a path is not a model."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelbay.errors import ModelNotFoundError, NotAModelError, SourceError

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<total>\d{5})(?P<suffix>\.\w+)")

#: A link may lead to anything, a disk with millions of files too. What of it belongs to a model are so many files and
#: folders at most, and no folder is deeper: modules, templates and code are two or three deep.
_MOST_FILES, _MOST_FOLDERS, _DEEPEST = 10_000, 1_000, 4


def list_directory(root: Path, file_suffixes: Sequence[str] = ()) -> tuple[str, ...]:
    """Files below ``root``, "/"-separated and sorted. Hidden folders (``.git``) and caches are left out; links to
    folders are followed.

    A directory that cannot be a model is not walked: listing a home directory to refuse it would take minutes.
    """
    try:
        top = [entry.name for entry in os.scandir(root) if _is_file(entry)]
    except OSError as error:
        raise SourceError(f"cannot list {root}: {error.strerror}.", hint="Check its permissions.") from error
    suffixes = tuple(file_suffixes)
    one_down = [entry.relative_to(root).as_posix() for entry in root.glob("[!.]*/*") if entry.name.endswith(suffixes)]
    if "config.json" not in top and not any(name.endswith(suffixes) for name in top) and not one_down:
        return tuple(sorted(top))
    return tuple(sorted(path.relative_to(root).as_posix() for path in _walk(root)))


def _walk(root: Path) -> Iterator[Path]:
    """Files below ``root``, also through links to folders: of what a link leads to, no more than a model has there."""
    linked: list[Path] = []
    for place, folders, files in os.walk(root):
        folder = Path(place)
        folders[:] = [name for name in folders if not _is_hidden(name)]
        linked += [folder / name for name in folders if (folder / name).is_symlink()]
        yield from (path for path in (folder / name for name in files) if not _is_pipe(path))
    for link in sorted(linked):
        yield from itertools.islice(_behind(link), _MOST_FILES)


def _behind(link: Path) -> Iterator[Path]:
    """Files of the folder that a link leads to, nearest first.

    A folder that lies around the one where it is found is not entered, so that a circle of links ends.
    """
    waiting: deque[tuple[Path, tuple[Path, ...]]] = deque([(link, (link.parent.resolve(),))])
    for _ in range(_MOST_FOLDERS):
        if not waiting:
            return
        folder, around = waiting.popleft()
        real = folder.resolve()
        if any(outer.is_relative_to(real) for outer in around):
            continue
        for entry in _entries(folder):
            path = Path(entry.path)
            if not path.is_dir():
                if not _is_pipe(path):
                    yield path
            elif not _is_hidden(entry.name) and len(around) < _DEEPEST and len(waiting) < _MOST_FOLDERS:
                waiting.append((path, (*around, real)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """In order. As `os.walk` has it, a folder that may not be read is empty."""
    try:
        with os.scandir(folder) as found:
            return sorted(itertools.islice(found, _MOST_FILES), key=lambda entry: entry.name)
    except OSError:
        return []


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A link that leads back to itself is none."""
    try:
        return entry.is_file()
    except OSError:
        return False


def _is_pipe(path: Path) -> bool:
    """Pipes, sockets, devices: reading them waits, for ever perhaps. A link to nothing stays, for its own message."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def list_shards(root: Path, entry: str) -> tuple[str, ...]:
    """The file itself, or all files of the split checkpoint (``-00001-of-00003``) it is a part of."""
    part = _SHARD.fullmatch(entry)
    if part is None:
        return (entry,)
    same = re.compile(rf"{re.escape(part['stem'])}-\d{{5}}-of-{part['total']}{re.escape(part['suffix'])}")
    return tuple(sorted(path.name for path in root.iterdir() if same.fullmatch(path.name)))


def missing_path(reference: str, path: Path) -> ModelNotFoundError:
    """For a reference that can only be a path, and does not exist."""
    if "://" in reference:
        return ModelNotFoundError(f"{reference} is an address, not a model reference.", hint="Give org/name.")
    if path.is_symlink():
        return ModelNotFoundError(f"{reference} is a link to {os.readlink(path)}, which does not exist.")
    parent = path.parent
    if not parent.is_dir():
        existing = next((folder for folder in parent.parents if folder.is_dir()), Path("/"))
        return ModelNotFoundError(
            f"there is no path {reference} ({existing.absolute()} exists, {parent.absolute()} does not).",
            hint="Check the path.",
        )
    near = difflib.get_close_matches(path.name, sorted(os.listdir(parent)), n=1)
    hint = f"Did you mean {parent / near[0]}?" if near else f"Check the path; {parent.absolute()} exists."
    return ModelNotFoundError(f"there is no path {reference}.", hint=hint)


def not_a_model_file(path: Path, file_suffixes: Sequence[str]) -> NotAModelError:
    """For a path to a file that is not a model by itself."""
    known = f" Files that are models by themselves end in {', '.join(file_suffixes)}." if file_suffixes else ""
    return NotAModelError(f"{path} is a file.{known}", hint=f"Give its directory: {path.parent}")


def not_a_model_directory(
    reference: str, root: Path, names: Sequence[str], file_suffixes: Sequence[str]
) -> NotAModelError:
    """For a directory without config.json."""
    or_file = f" and no {' or '.join(file_suffixes)} file" if file_suffixes else ""
    found = f"holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" if names else "is empty of files"
    hint = next_step(names) or _hint_below(root)
    if _is_pipe(root / "config.json"):
        hint = f"{root / 'config.json'} is no regular file, and is not read."
    if hint is None:
        hint = "Give the directory that holds the model's config.json."
        if reference.count("/") == 1 and not reference.startswith((".", "/", "~")):
            hint += f" If the hub's {reference} was meant: a local directory of this name wins; run elsewhere."
    return NotAModelError(f"{reference} is a directory without config.json{or_file}; it {found}.", hint=hint)


def next_step(names: Sequence[str]) -> str | None:
    """What a listing without config.json seems to be, if that is known."""
    if "adapter_config.json" in names:
        return "It is an adapter (adapter_config.json): merge it into its base model first."
    if "model_index.json" in names:
        return "It is a diffusion pipeline (model_index.json), which is not served here."
    return None


def _hint_below(root: Path) -> str | None:
    below = sorted(root.glob("[!.]*/config.json")) + sorted(root.glob("snapshots/*/config.json"))
    return f"Did you mean {below[-1].parent}?" if below else None
