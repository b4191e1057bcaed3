"""What a weight file that cannot be read probably is: one sentence for the person who has to fetch it again."""

from __future__ import annotations

from pathlib import Path

from modelbay.errors import WeightsError

_LFS_POINTER = b"version https://git-lfs"
_HTML = (b"<!doctype", b"<html", b"<?xml")
_PROBE = 64


def likely_cause(path: Path) -> tuple[str, str] | None:
    """``(what the file is, what to do)`` for the files that downloads leave behind; None if nothing gives it away."""
    again = "Download it again."
    with path.open("rb") as file:
        head = file.read(_PROBE)
    if not head:
        return "it is empty: the download or the copy did not finish", again
    if head.startswith(_LFS_POINTER):
        return "it is a Git LFS pointer, not the file it points to", "Run `git lfs pull` in the repository."
    if head.lstrip().lower().startswith(_HTML):
        return "it is a web page: the download was answered with an error or a login page", again
    if not any(head):
        return "it begins with zeros: the download or the copy did not finish", again
    return None


def damaged(path: Path, problem: str, hint: str | None = None) -> WeightsError:
    """The error for a file whose content is wrong: ``problem``, unless the file itself tells a likelier cause."""
    try:
        cause = likely_cause(path)
    except OSError as error:
        return WeightsError(f"cannot read weight file {path}: {error.strerror or error}.")
    if cause is not None:
        problem, hint = cause
    return WeightsError(f"weight file {path} cannot be used: {problem}.", hint=hint)
