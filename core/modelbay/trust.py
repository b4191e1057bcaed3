"""The one gate for other people's code: only this module may import Python files from a model repository."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.errors import ConfigError, RemoteCodeError, TrustError
from modelbay.remote_code.closure import Closure, file_of, find_closure
from modelbay.remote_code.store import package_name, store

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

_REFERENCE = re.compile(r"(?:(?P<repo>[\w.-]+/[\w.-]+)--)?(?P<module>\w+(?:\.\w+)*)\.(?P<name>\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A parsed ``auto_map`` entry: ``repo`` is None for the model's own repository."""

    repo: str | None
    module: str
    name: str

    @classmethod
    def parse(cls, reference: str, what: str) -> _Reference:
        match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        if match is None:
            raise ConfigError(
                f"the auto_map entry for {what} is {reference!r}.",
                hint='It must be "module.Class" or "org/code--module.Class".',
            )
        return cls(match["repo"], match["module"], match["name"])


def load_remote_class(
    reference: str, files: ModelFiles, *, trusted: bool, code_revision: str | None, what: str, trace: Trace
) -> Any:
    """Import the class that an ``auto_map`` entry names (``"module.Class"`` or ``"org/code--module.Class"``).

    The modules that the model's config names in the same repository, and all they import relatively, become one
    package, named by the hash of its content: the same content is the same class, in this process and, by pickle, in
    others; an edited file makes a new one; the config class that the model's module imports is the one that was loaded
    for the config. Packages that the code imports absolutely must be installed.

    Args:
        files: the model's repository.
        trusted: whether the user allows code from repositories to run. Local directories need it too.
        code_revision: branch, tag or commit of the code. None: the commit of ``files`` if the code is in the same
            repository, else the default branch of the other one: a commit of one repository is never sent to another.
        what: what the class is for, as in "the config class", for messages.

    Raises:
        TrustError: not trusted; names the repository, the class, and the flag. Raised before anything is imported
            or downloaded, and never asks.
        ConfigError: the entry is malformed.
        RemoteCodeError: the code is missing, or failed while it was imported.
    """
    parsed = _Reference.parse(reference, what)
    repository = parsed.repo or files.reference
    if trusted is not True:
        raise TrustError(
            f"{what} of {files.reference} is the class {parsed.name} in {repository} "
            f"({file_of(parsed.module)}), and code from model repositories is not trusted.",
            hint="Read that file, then pass --trust-remote-code (trust_remote_code=True) to let it run.",
        )
    code = _code_files(parsed, files, code_revision, trace)
    closure = find_closure(code, parsed.module, _modules_beside(parsed, files))
    if f"{package_name(closure)}.{parsed.module}" not in sys.modules:
        store(closure)
    found = _import(closure, parsed, repository)
    trace.decide(
        "source",
        f"remote code: {what}",
        {
            "class": parsed.name,
            "repository": code.repo_id or str(code.root),
            "commit": code.commit,
            "package": package_name(closure),
            "files": closure.digests(),
        },
        f"auto_map {reference!r}, trusted by trust_remote_code",
    )
    return found


def _code_files(parsed: _Reference, files: ModelFiles, code_revision: str | None, trace: Trace) -> ModelFiles:
    """The repository that the code is taken from, at its own commit."""
    from modelbay.source import find_repository

    if parsed.repo in (None, files.repo_id):
        if code_revision is None or code_revision in (files.commit, files.revision):
            return files
        if files.repo_id is None:
            trace.warn(
                "source", "code revision", None, f"{files.reference} is a local path: {code_revision!r} has no meaning"
            )
            return files
        return find_repository(files.repo_id, revision=code_revision, local=False, trace=trace)
    assert parsed.repo is not None
    if code_revision is None:
        trace.warn(
            "source", "code revision", "main", f"the code is in {parsed.repo}; pin it with --code-revision COMMIT"
        )
    # Never a local directory: the model, not the user, wrote this name.
    return find_repository(parsed.repo, revision=code_revision, local=False, trace=trace)


def _modules_beside(parsed: _Reference, files: ModelFiles) -> list[str]:
    """The modules of all ``auto_map`` entries in config.json that lie in the same repository as this one."""
    modules = set()
    for entry in _auto_map_entries(files.read_json("config.json") or {}):
        match = _REFERENCE.fullmatch(entry)
        if match and (match["repo"] or files.repo_id) == (parsed.repo or files.repo_id):
            modules.add(match["module"])
    return sorted(modules)


def _auto_map_entries(value: Any, inside: bool = False) -> Iterator[str]:
    """The strings below every ``auto_map`` key, at any depth: sub-configs may have their own."""
    if isinstance(value, str) and inside:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _auto_map_entries(item, inside)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _auto_map_entries(item, inside or key == "auto_map")


def _import(closure: Closure, parsed: _Reference, repository: str) -> Any:
    where = f"{file_of(parsed.module)} of {repository}"
    package = package_name(closure)
    try:
        module = importlib.import_module(f"{package}.{parsed.module}")
    except (Exception, SystemExit) as error:
        raise RemoteCodeError(f"{where} failed while it was imported: {_reason(error, package)}") from error
    if not isinstance(getattr(module, parsed.name, None), type):
        near = ", ".join(sorted(name for name, value in vars(module).items() if isinstance(value, type))[:10])
        raise RemoteCodeError(f"{where} has no class {parsed.name}.", hint=f"Its classes: {near or 'none'}.")
    return getattr(module, parsed.name)


def _reason(error: BaseException, package: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if error.name.startswith(package):
            return (
                f"it needs {error.name.removeprefix(package + '.').replace('.', '/')}.py, which the repository lacks."
            )
        name = error.name.partition(".")[0]
        return f"it needs the Python package {name}. Install it: pip install {name}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
