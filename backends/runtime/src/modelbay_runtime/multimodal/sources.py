"""Where the bytes of an image or of audio come from, and what may be read.

A reference is a path, ``file:`` URL, ``data:`` URL or ``http(s):`` URL; bytes stand for themselves.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from modelbay.errors import UsageError

#: Largest file of one item.
MAX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """What may be read.

    Attributes:
        domains: hosts that may be fetched from, in lower case.
        local: "all" files, those of one directory, or none.
    """

    domains: frozenset[str] = frozenset()
    local: Path | str | None = "all"
    max_bytes: int = MAX_BYTES

    @classmethod
    def of(cls, domains: Sequence[str], local: str | None, *, untrusted: bool) -> MediaPolicy:
        """Who calls from Python or the command line may read what they may read anyway; a client of a server only what
        the server's owner allowed."""
        allowed: Path | str | None = "all"
        if untrusted:
            allowed = None if local is None else Path(local).expanduser().resolve()
        return cls(frozenset(domain.strip().lower() for domain in domains), allowed)


def read_bytes(source: Any, kind: str, policy: MediaPolicy) -> bytes:
    """The content that a reference stands for.

    Args:
        kind: "image" or "audio", for messages.

    Raises:
        UsageError: not a reference, not allowed, not to be had, or too large.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return _sized(bytes(source), kind, policy)
    if isinstance(source, os.PathLike):
        return _read_file(Path(source), kind, policy)
    if not isinstance(source, str):
        raise UsageError(f"{kind}: a path, URL, bytes or the {kind} itself was expected, got {type(source).__name__}.")
    scheme = source[:8].partition(":")[0].lower() if ":" in source[:8] else ""
    if scheme == "data":
        return _sized(_decode_data_url(source, kind, policy), kind, policy)
    if scheme in ("http", "https"):
        from modelbay_runtime.multimodal.download import download

        return download(source, kind, policy)
    if scheme == "file":
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{kind}: {_shown(source)} names a host; file URLs are for this machine's files.")
        return _read_file(Path(unquote(parts.path)), kind, policy)
    if "://" in source[:32]:
        raise UsageError(f"{kind}: {_shown(source)} is no http, https, data or file URL.")
    return _read_file(Path(source), kind, policy)


def decode_base64(text: str, kind: str) -> bytes:
    """Raises:
    UsageError: it is not base64.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{kind}: the data is not base64 ({error}).") from error


def _decode_data_url(url: str, kind: str, policy: MediaPolicy) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise UsageError(f"{kind}: {_shown(url)} is no data URL: it has no comma.")
    if len(body) > 2 * policy.max_bytes:
        raise _too_large(kind, policy)
    if head.lower().endswith(";base64"):
        return decode_base64(unquote(body) if "%" in body else body, kind)
    return unquote_to_bytes(body)


def _read_file(path: Path, kind: str, policy: MediaPolicy) -> bytes:
    if policy.local is None:
        raise UsageError(
            f"{kind}: files of the server are not read for requests.",
            hint="Send a data URL, or let the server's owner set allowed_local_media_path.",
        )
    try:
        path = path.expanduser()
        if isinstance(policy.local, Path):
            path = path.resolve()
            if not path.is_relative_to(policy.local):  # said alike for files that are there and files that are not
                raise UsageError(f"{kind}: only files below allowed_local_media_path are read for requests.")
        if not path.is_file():  # a device or pipe would be read without end
            raise UsageError(f"{kind}: {_shown(str(path))} is not a file.")
        if path.stat().st_size > policy.max_bytes:
            raise _too_large(kind, policy)
        return path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{kind}: {_shown(str(path))} cannot be read: {reason}.") from error


def _sized(data: bytes, kind: str, policy: MediaPolicy) -> bytes:
    if len(data) > policy.max_bytes:
        raise _too_large(kind, policy)
    return data


def _too_large(kind: str, policy: MediaPolicy) -> UsageError:
    return UsageError(f"{kind}: the file is larger than {policy.max_bytes // 2**20} MiB, the most that is read.")


def _shown(text: str) -> str:
    """For a message: one line, short, no control characters."""
    return repr(text if len(text) <= 80 else f"{text[:77]}…")
