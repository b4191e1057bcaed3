"""The files that modules of a model repository need: themselves and what they import relatively, to any depth."""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from modelbay.errors import RemoteCodeError
from modelbay.small_files import read_bytes

if TYPE_CHECKING:
    from modelbay.source import ModelFiles

#: CPython 3.11 counts the depth of a tree that it builds for all threads together, and fails where two build one.
_PARSING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Closure:
    """The content of modules and of everything they import from their repository, by file name."""

    files: dict[str, bytes]

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file."""
        return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(self.files.items())}

    def digest(self) -> str:
        """The SHA-256 of the whole: names and contents."""
        whole = hashlib.sha256()
        for name, digest in self.digests().items():
            whole.update(f"{digest}  {name}\n".encode())
        return whole.hexdigest()


def file_of(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def find_closure(files: ModelFiles, module: str, beside: Iterable[str] = ()) -> Closure:
    """Read a module and, from its syntax alone, all it imports relatively. Nothing is run.

    What does not parse, and a relative import whose file the repository lacks, is left to fail when the code runs: it
    may be in a ``try``, or not run at all.

    Args:
        beside: modules that belong to the same package, as far as the repository has them.

    Raises:
        RemoteCodeError: the module itself is absent.
    """
    entry = file_of(module)
    if not files.has(entry) and files.complete:
        python = ", ".join(name for name in files.names if name.endswith(".py"))
        raise RemoteCodeError(f"{files.reference} has no {entry}.", hint=f"Its Python files: {python or 'none'}.")
    found: dict[str, bytes] = {}
    pending = [entry, *(file_of(other) for other in beside if files.has(file_of(other)))]
    pending += [init for name in pending for init in _packages_above(files, name)]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = read_bytes(files.fetch([name])[0])
            pending += _imported_files(files, name, found[name])
    return Closure(found)


def _imported_files(files: ModelFiles, name: str, content: bytes) -> Iterator[str]:
    """The repository's files that one file imports relatively."""
    try:
        with _PARSING:
            tree = ast.parse(content, filename=name)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            for target in _targets(name, node):
                for candidate in (f"{target}.py", f"{target}/__init__.py"):
                    if files.has(candidate):
                        yield candidate
                        yield from _packages_above(files, candidate)
                        break


def _targets(name: str, node: ast.ImportFrom) -> Iterator[str]:
    """What ``from <dots><module> import <names>`` may mean, as paths without ``.py``: a name can be a module too."""
    folder = PurePosixPath(name).parent
    if node.level - 1 > len(folder.parts):
        return  # leaves the repository: Python refuses it when it runs
    parts = folder.parts[: len(folder.parts) - (node.level - 1)] + tuple((node.module or "").split("."))
    base = "/".join(part for part in parts if part)
    if base:
        yield base
    for alias in node.names:
        yield f"{base}/{alias.name}" if base else alias.name


def _packages_above(files: ModelFiles, name: str) -> Iterator[str]:
    """The ``__init__.py`` files of the folders that a file is in; the repository's own is left out."""
    for folder in PurePosixPath(name).parents:
        if folder.parts and files.has(f"{folder}/__init__.py"):
            yield f"{folder}/__init__.py"
