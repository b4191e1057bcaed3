"""The one gate for other people's code: only this module may import Python files from a model repository."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modelbay import trust_lock
from modelbay.errors import ModelbayError, RemoteCodeError, TrustError, one_line_with_type
from modelbay.remote_code.closure import Closure, file_of, find_closure
from modelbay.remote_code.references import Reference, all_code, code_files, modules_beside
from modelbay.remote_code.store import package_name, store

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace


def load_remote_class(
    reference: str, files: ModelFiles, *, trusted: bool, code_revision: str | None, what: str, trace: Trace
) -> Any:
    """Import the class that an ``auto_map`` entry names (``"module.Class"`` or ``"org/code--module.Class"``).

    The modules that the model's config names in the same repository, and all they import relatively, become one
    package, named by the hash of its content: the same content is the same class, in this process and, by pickle, in
    others; an edited file makes a new one; the config class that the model's module imports is the one that was loaded
    for the config. Packages that the code imports absolutely must be installed.

    Trust is given to content: the first use records the hash of each file, and what differs later is refused until
    `modelbay trust add` (see `modelbay.trust_lock`).

    Args:
        files: the model's repository.
        trusted: whether the user allows code from repositories to run. Local directories need it too.
        code_revision: branch, tag or commit of the code. None: the commit of ``files`` if the code is in the same
            repository, else the default branch of the other one: a commit of one repository is never sent to another.
        what: what the class is for, as in "the config class", for messages.

    Raises:
        TrustError: not trusted; names the repository, the class, and the flag. Raised before anything is imported
            or downloaded, and never asks. Or the code is not the code that was trusted; names the changed files.
        ConfigError: the entry is malformed.
        RemoteCodeError: the code is missing, or failed while it was imported.
    """
    parsed = Reference.parse(reference, what)
    repository = parsed.repo or files.reference
    if trusted is not True:
        raise TrustError(
            f"{what} of {files.reference} is the class {parsed.name} in {repository} "
            f"({file_of(parsed.module)}), and code from model repositories is not trusted.",
            hint="Read that file, then pass --trust-remote-code (trust_remote_code=True) to let it run.",
        )
    code = code_files(parsed.repo, files, code_revision, trace)
    closure = find_closure(code, parsed.module, modules_beside(parsed, files))
    known = _admit(code, closure, files, code_revision, trace)
    if f"{package_name(closure)}.{parsed.module}" not in sys.modules:
        store(closure)
    found = _import(closure, parsed, repository)
    trace.decide(
        "source",
        f"remote code: {what}",
        {
            "class": parsed.name,
            "repository": trust_lock.repository_of(code),
            "commit": code.commit,
            "package": package_name(closure),
            "files": closure.digests(),
        },
        f"auto_map {reference!r}, trusted by trust_remote_code; {known}",
    )
    return found


def _admit(code: ModelFiles, closure: Closure, files: ModelFiles, code_revision: str | None, trace: Trace) -> str:
    """Compare with the record of what was trusted, or begin it; returns which it was.

    Raises:
        TrustError: the code is not what was trusted.
    """
    digests = closure.digests()

    def on_first_use() -> dict[str, str]:
        # A commit stands for all its files. A directory has none: everything that its configs name belongs to it.
        return digests if code.commit else {**_named_in(code, trace), **digests}

    renew = ["modelbay", "trust", "add", str(files.root) if files.kind == "local" else files.reference]
    renew += ["--revision", files.commit] if files.commit else []
    renew += ["--code-revision", code_revision] if code_revision else []
    return trust_lock.admit(code, digests, on_first_use, shlex.join(renew), trace)


def _named_in(directory: ModelFiles, trace: Trace) -> dict[str, str]:
    try:
        found = all_code(directory, None, trace)
    except ModelbayError:  # of a file that is not needed now; whoever needs it will say what is wrong with it
        return {}
    return {name: digest for code, closure in found if code is directory for name, digest in closure.digests().items()}


def is_interrupt(error: BaseException) -> bool:
    """Whether it is the user's Ctrl-C, rather than something that code raises to get past ``except Exception``."""
    return type(error) is KeyboardInterrupt


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Run trusted code: what would end the process (SystemExit and its like) is an error of that code.

    Args:
        what: which code, for the message.

    Raises:
        RemoteCodeError: it raised what is no Exception; Exceptions pass.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise RemoteCodeError(f"{what} raised {one_line_with_type(error)}.") from error


def _import(closure: Closure, parsed: Reference, repository: str) -> Any:
    where = f"{file_of(parsed.module)} of {repository}"
    package = package_name(closure)
    try:
        module = importlib.import_module(f"{package}.{parsed.module}")
    except BaseException as error:
        if is_interrupt(error):
            raise
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
    return one_line_with_type(error)
