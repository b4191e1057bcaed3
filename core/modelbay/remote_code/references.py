"""What ``auto_map`` names: which class, in which module of which repository, and that repository's files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelbay.errors import ConfigError
from modelbay.remote_code.closure import Closure, file_of, find_closure

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

_REFERENCE = re.compile(r"(?:(?P<repo>[\w.-]+/[\w.-]+)--)?(?P<module>\w+(?:\.\w+)*)\.(?P<name>\w+)", re.ASCII)

#: Files whose ``auto_map`` entries name code.
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed ``auto_map`` entry: ``repo`` is None for the model's own repository."""

    repo: str | None
    module: str
    name: str

    @classmethod
    def parse(cls, reference: str, what: str) -> Reference:
        """``"module.Class"`` or ``"org/code--module.Class"``.

        Raises:
            ConfigError: it is neither; ``what`` says what the class is for.
        """
        match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
        if match is None:
            raise ConfigError(
                f"the auto_map entry for {what} is {reference!r}.",
                hint='It must be "module.Class" or "org/code--module.Class".',
            )
        return cls(match["repo"], match["module"], match["name"])


def code_files(repo: str | None, files: ModelFiles, code_revision: str | None, trace: Trace) -> ModelFiles:
    """The repository that the code is taken from, at its own commit (BEHAVIOUR S2)."""
    from modelbay.source import find_repository

    if repo in (None, files.repo_id):
        if code_revision is None or code_revision in (files.commit, files.revision):
            return files
        if files.repo_id is None:
            trace.warn(
                "source", "code revision", None, f"{files.reference} is a local path: {code_revision!r} has no meaning"
            )
            return files
        return find_repository(files.repo_id, revision=code_revision, local=False, trace=trace)
    assert repo is not None
    if code_revision is None:
        trace.warn("source", "code revision", "main", f"the code is in {repo}; pin it with --code-revision COMMIT")
    # Never a local directory: the model, not the user, wrote this name.
    return find_repository(repo, revision=code_revision, local=False, trace=trace)


def modules_beside(parsed: Reference, files: ModelFiles) -> list[str]:
    """The modules of all ``auto_map`` entries in config.json that lie in the same repository as this one."""
    named = _modules(files, ("config.json",))
    return named.get(parsed.repo or files.repo_id, [])


def all_code(files: ModelFiles, code_revision: str | None, trace: Trace) -> list[tuple[ModelFiles, Closure]]:
    """Every repository whose code the model's files name, at the commit that would be used, with that code.

    Modules that a repository lacks are left out. Nothing is run.
    """
    found = []
    for repo, modules in _modules(files, _CONFIGS).items():
        code = code_files(repo, files, code_revision, trace)
        present = [module for module in modules if code.has(file_of(module))]
        if present:
            found.append((code, find_closure(code, present[0], present[1:])))
    return found


def _modules(files: ModelFiles, configs: tuple[str, ...]) -> dict[str | None, list[str]]:
    """Repository -> modules, both in a settled order. The model's own repository goes by its id (None if local)."""
    modules: dict[str | None, set[str]] = {}
    for name in configs:
        for entry in _auto_map_entries(files.read_json(name) or {}):
            match = _REFERENCE.fullmatch(entry)
            if match:
                modules.setdefault(match["repo"] or files.repo_id, set()).add(match["module"])
    return {repo: sorted(modules[repo]) for repo in sorted(modules, key=lambda repo: repo or "")}


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
