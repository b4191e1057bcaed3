"""``trust.lock``: which code was trusted, by content. Recorded on first use; what differs later is refused.

The file is JSON: ``{"format": 1, "trusted": {repository: [{"commit", "since", "files": {name: SHA-256}}]}}``, where a
repository is a hub id or a directory. It is ``$MODELBAY_TRUST_LOCK`` (empty: no record is kept and none is checked),
else ``modelbay/trust.lock`` in the user's configuration directory. A repository may have several trusted contents, as
of two revisions in use; code is admitted if one of them covers all its files.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelbay.checked_json import check, check_commit, check_files, check_format, check_keys, check_object, parse
from modelbay.errors import TrustError
from modelbay.settings import default_path
from modelbay.small_files import read_text

if TYPE_CHECKING:
    from modelbay.source import ModelFiles
    from modelbay.trace import Trace

_FORMAT = 1
#: Longest wait for another process that changes the record, in seconds. It takes milliseconds.
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class TrustedCode:
    """One content of a repository. ``commit`` is None for a directory; ``files`` maps names to SHA-256."""

    commit: str | None
    since: str
    files: Mapping[str, str]

    def covers(self, files: Mapping[str, str]) -> bool:
        return files.items() <= self.files.items()

    def extends_to(self, commit: str | None, files: Mapping[str, str]) -> bool:
        """Whether these are more files of the very commit that was trusted."""
        return commit is not None and commit == self.commit and not self.changed(files)

    def changed(self, files: Mapping[str, str]) -> list[str]:
        return [name for name, digest in files.items() if self.files.get(name, digest) != digest]

    def unknown(self, files: Mapping[str, str]) -> list[str]:
        return [name for name in files if name not in self.files]


Record = dict[str, list[TrustedCode]]


def lock_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the record is, None if the user wants none."""
    environ = os.environ if environ is None else environ
    if "MODELBAY_TRUST_LOCK" in environ:
        named = environ["MODELBAY_TRUST_LOCK"].strip()
        return Path(os.path.realpath(os.path.expanduser(named))) if named else None
    return Path(os.path.realpath(default_path(environ).with_name("trust.lock")))


def repository_of(code: ModelFiles) -> str:
    """The name under which a repository is recorded: its hub id, or the directory."""
    return code.repo_id or str(code.root)


def admit(
    code: ModelFiles, files: Mapping[str, str], on_first_use: Callable[[], Mapping[str, str]], renew: str, trace: Trace
) -> str:
    """Let code pass that was trusted or is met for the first time; returns which it was, in words.

    Args:
        files: the SHA-256 of each file that is about to be imported.
        on_first_use: gives the files to record then.
        renew: the command that trusts the present content, for the error.

    Raises:
        TrustError: another content was trusted; names the files that differ.
    """
    path = lock_path()
    if path is None:
        return "not checked: MODELBAY_TRUST_LOCK is empty"
    repository = repository_of(code)
    known = _covering(read(path).get(repository, []), files)
    if known is not None:
        return f"unchanged since {known.since} ({path})"
    try:
        with _updating(path) as record:
            contents = record.setdefault(repository, [])
            if _covering(contents, files) is None:  # else another process was faster
                if contents and not any(content.extends_to(code.commit, files) for content in contents):
                    raise _refusal(repository, contents[-1], files, path, renew)
                record[repository] = _with(contents, code.commit, on_first_use())
    except OSError as error:
        _check_unwritable(repository, path, code, files, renew)
        trace.warn("source", "trust.lock", "not recorded", f"{path} cannot be written: {error.strerror or error}")
        return "first use, not recorded"
    return f"first use, recorded in {path}"


def add(code: ModelFiles, files: Mapping[str, str]) -> bool:
    """Trust this content; False if it already was. What was trusted before stays so.

    Raises:
        TrustError: there is no record, or it cannot be read or written.
    """
    path = _required_path()
    try:
        with _updating(path) as record:
            contents = record.setdefault(repository_of(code), [])
            if _covering(contents, files) is not None:
                return False
            record[repository_of(code)] = _with(contents, code.commit, files)
            return True
    except OSError as error:
        raise _unwritable(path, error) from error


def remove(repository: str) -> bool:
    """Forget everything that was trusted of a repository; False if nothing was.

    Raises:
        TrustError: there is no record, or it cannot be read or written.
    """
    path = _required_path()
    if repository not in read(path):
        return False
    try:
        with _updating(path) as record:
            return record.pop(repository, None) is not None
    except OSError as error:
        raise _unwritable(path, error) from error


def read(path: Path) -> Record:
    """What was trusted, by repository.

    Raises:
        TrustError: the file is no such record. It is never taken for an empty one.
    """
    try:
        return _record(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TrustError(
            f"the trust record {path} cannot be read: {error.strerror}.",
            hint="MODELBAY_TRUST_LOCK names another file; set to nothing, it keeps no record.",
        ) from error
    except ValueError as error:
        raise TrustError(
            f"the trust record {path} is damaged: {error}.",
            hint="Restore it, or remove it and trust again what you use.",
        ) from error


def _record(text: str) -> Record:
    """Raises ValueError: it is no record; says where."""
    data = parse(text)
    check_keys(data, "the file", ("format", "trusted"))
    check_format(data["format"], _FORMAT)
    record = {}
    for repository, contents in check_object(data["trusted"], "trusted").items():
        where = f"trusted[{repository!r}]"
        check(repository, "a name in trusted", bool(repository), "a hub id or a directory")
        check(contents, where, isinstance(contents, list) and bool(contents), "a list with what was trusted")
        record[repository] = [_content(item, f"{where}[{number}]") for number, item in enumerate(contents)]
    return record


def _content(item: Any, where: str) -> TrustedCode:
    check_keys(item, where, ("commit", "since", "files"))
    check_commit(item["commit"], f"{where}.commit")
    check(item["since"], f"{where}.since", _is_time(item["since"]), "a time, as in 2026-01-31T12:00:00+00:00")
    check_files(item["files"], f"{where}.files")
    check(item["files"], f"{where}.files", bool(item["files"]), "at least one file")  # else it would cover any commit
    return TrustedCode(item["commit"], item["since"], item["files"])


def _is_time(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def _covering(contents: list[TrustedCode], files: Mapping[str, str]) -> TrustedCode | None:
    return next((content for content in contents if content.covers(files)), None)


def _with(contents: list[TrustedCode], commit: str | None, files: Mapping[str, str]) -> list[TrustedCode]:
    """These files added to the content of the same commit, or as a content of their own, the latest."""
    for index, content in enumerate(contents):
        if content.extends_to(commit, files):
            return [*contents[:index], *contents[index + 1 :], replace(content, files={**content.files, **files})]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return [*contents, TrustedCode(commit, now, dict(files))]


@contextmanager
def _updating(path: Path) -> Iterator[Record]:
    """The record, to be changed; written back whole. Other processes wait, readers see the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _guarded(path):
        record = read(path)
        before = repr(record)
        yield record
        if repr(record) == before:
            return
        trusted = {name: [asdict(content) for content in record[name]] for name in sorted(record) if record[name]}
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            temporary.write_text(json.dumps({"format": _FORMAT, "trusted": trusted}, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def _guarded(path: Path) -> Iterator[None]:
    """One process at a time.

    Raises:
        OSError: nothing can be written there.
        TrustError: another process does not let go.
    """
    from huggingface_hub.utils import WeakFileLock

    # Where no file can be made, the lock would take it for one that another process is just removing, and try again.
    probe = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    probe.touch(exist_ok=False)
    probe.unlink()
    guard = path.with_name(f".{path.name}.guard")
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(guard, timeout=_LONGEST_WAIT_S))
        except TimeoutError as error:
            raise TrustError(
                f"the trust record {path} cannot be changed: another process has held {guard} for "
                f"{_LONGEST_WAIT_S:g} seconds.",
                hint="Wait until it is done, or end it.",
            ) from error
        yield


def _refusal(repository: str, trusted: TrustedCode, files: Mapping[str, str], path: Path, renew: str) -> TrustError:
    differences = [f"{name} differs" for name in trusted.changed(files)]
    differences += [f"{name} is new" for name in trusted.unknown(files)]
    at = f" at commit {trusted.commit}" if trusted.commit else ""
    return TrustError(
        f"the code of {repository} is not the code that was trusted{at} ({path}, {trusted.since}): "
        f"{', '.join(differences)}.",
        hint=f"Read what changed, then run: {renew}",
    )


def _check_unwritable(repository: str, path: Path, code: ModelFiles, files: Mapping[str, str], renew: str) -> None:
    """A record that cannot be written still says what was trusted."""
    contents = read(path).get(repository, [])
    if contents and not any(content.extends_to(code.commit, files) for content in contents):
        raise _refusal(repository, contents[-1], files, path, renew)


def _required_path() -> Path:
    path = lock_path()
    if path is None:
        raise TrustError("no trust record is kept: MODELBAY_TRUST_LOCK is empty.", hint="Unset it, or name a file.")
    return path


def _unwritable(path: Path, error: OSError) -> TrustError:
    return TrustError(
        f"the trust record {path} cannot be written: {error.strerror or error}.",
        hint="Point MODELBAY_TRUST_LOCK to a file that can.",
    )
