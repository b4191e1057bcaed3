"""What went wrong on the way to the hub, in words: each kind of trouble is a different error with its next step."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelbay.errors import (
    AuthenticationError,
    GatedModelError,
    ModelbayError,
    ModelNotFoundError,
    OfflineError,
    RevisionNotFoundError,
    SourceError,
    one_line_with_type,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of the hub, for the error message.

    Args:
        endpoint: the hub's address.
        name: the file in question, None for the repository as a whole.
        cache: the directory that a download is written to.
        needed: the bytes that were to be written there.
    """

    repo_id: str
    revision: str
    endpoint: str
    name: str | None = None
    cache: Path | None = None
    needed: int | None = None

    @property
    def what(self) -> str:
        return f"{self.name} of {self.repo_id}" if self.name else self.repo_id

    @property
    def page(self) -> str:
        return f"{self.endpoint}/{self.repo_id}"


@contextmanager
def translated(asked: Asked) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client and the operating system raise into errors of `modelbay.errors`."""
    try:
        yield
    except ModelbayError:
        raise
    except Exception as error:
        raise _in_words(_origin(error), asked) from error


def _origin(error: BaseException) -> BaseException:
    """The reason behind huggingface_hub's "not in the local cache either" and "Force download failed"."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while error.__cause__ is not None and (
        isinstance(error, LocalEntryNotFoundError) or (type(error) is ValueError and "download" in str(error))
    ):
        error = error.__cause__
    return error


def _in_words(error: BaseException, asked: Asked) -> ModelbayError:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return _refused(error.response, asked)
    if isinstance(error, OfflineModeIsEnabled):
        return OfflineError(
            f"{asked.what} is not in the cache, and HF_HUB_OFFLINE is set.", hint="Unset it to download."
        )
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2"):
        return OfflineError(
            f"cannot reach {asked.endpoint} for {asked.what} ({type(error).__name__}).",
            hint="Check the network, the proxy and HF_ENDPOINT, or use a local directory.",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _disk(error, asked)
    return SourceError(f"{asked.what} could not be had from {asked.endpoint}: {_one_line(error)}", hint="Run again.")


def _refused(response: Any, asked: Asked) -> SourceError:
    """By the status, and by the hub's own error code where it sends one."""
    status, code = response.status_code, response.headers.get("X-Error-Code")
    if status == 401:
        return _unauthorized(code, asked)
    if status == 403:
        gate = "is gated and this token has not been granted access" if code == "GatedRepo" else "is forbidden"
        return GatedModelError(
            f"{asked.what} {gate} (403).",
            hint=f"Ask for access at {asked.page}, and use a token that may read this repository.",
        )
    if code == "RevisionNotFound":
        return RevisionNotFoundError(
            f"{asked.repo_id} has no revision {asked.revision!r}.", hint=f"See its branches and tags at {asked.page}."
        )
    if code == "EntryNotFound":
        return SourceError(
            f"{asked.what} does not exist at revision {asked.revision}.", hint=f"See the files at {asked.page}."
        )
    if status == 404:
        return ModelNotFoundError(
            f"{asked.repo_id} is neither a path here nor a model on {asked.endpoint} (404).",
            hint="Check the spelling: a directory, or org/name.",
        )
    return SourceError(f"{asked.endpoint} answered {status} for {asked.what}.", hint="Try again later.")


def _unauthorized(code: str | None, asked: Asked) -> SourceError:
    """The hub answers 401 for a bad token, for a gated model, and (so as not to tell) for a private or absent one."""
    if code == "GatedRepo":
        return AuthenticationError(
            f"{asked.what} is gated and no valid token was sent (401).",
            hint=f"Accept its terms at {asked.page}, then set HF_TOKEN or run: hf auth login",
        )
    if code != "RepoNotFound" and os.environ.get("HF_TOKEN", "").strip():
        return AuthenticationError(
            f"the hub does not accept the token in HF_TOKEN, asked for {asked.what} (401).",
            hint="Make a new one in the hub's settings, or unset HF_TOKEN for public models.",
        )
    return AuthenticationError(
        f"{asked.repo_id} is not a public model: there is none of this name, or it needs a valid token (401).",
        hint="Check the spelling; for a private model set HF_TOKEN or run: hf auth login",
    )


def _disk(error: OSError, asked: Asked) -> SourceError:
    place = asked.cache or error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        amount = f" ({asked.needed:,} bytes)" if asked.needed is not None else ""
        return SourceError(
            f"the disk is full: {asked.what}{amount} does not fit into {place}.",
            hint="Free some space, or point HF_HUB_CACHE to another disk.",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return SourceError(
            f"{asked.what} cannot be stored: {place} is not writable.",
            hint="Point HF_HUB_CACHE to a writable directory.",
        )
    return SourceError(f"{asked.what} cannot be stored in {place}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return one_line_with_type(error)
