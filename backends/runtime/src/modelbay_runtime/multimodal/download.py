"""Media from hosts that are allowed: no other host by a redirect, no more bytes and no more time than is said."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urljoin, urlsplit

from modelbay.errors import UsageError
from modelbay_runtime.multimodal.sources import MediaPolicy

#: Seconds for one answer of the network, and for the whole.
SOCKET_TIMEOUT, TOTAL_TIMEOUT = 10.0, 60.0
MAX_REDIRECTS = 3
_CHUNK = 2**16


def download(url: str, kind: str, policy: MediaPolicy) -> bytes:
    """The body of ``url``.

    Raises:
        UsageError: a host that is not allowed, here or where it is redirected to; no answer, too large, too slow.
    """
    deadline = time.monotonic() + TOTAL_TIMEOUT
    for _ in range(MAX_REDIRECTS + 1):
        host = _allowed_host(url, kind, policy)
        try:
            # Its own opener: nothing is followed, and nothing global is asked.
            with urllib.request.build_opener(_NoRedirect).open(url, timeout=SOCKET_TIMEOUT) as answer:
                return _body(answer, kind, host, policy, deadline)
        except urllib.error.HTTPError as error:
            target = error.headers.get("Location") if error.code in (301, 302, 303, 307, 308) else None
            if not target:
                raise UsageError(f"{kind}: {host} answers {error.code} {error.reason}.") from error
            url = urljoin(url, target)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            reason = getattr(error, "reason", None) or error or type(error).__name__
            raise UsageError(f"{kind}: {host} gives no answer: {reason}.") from error
    raise UsageError(f"{kind}: more than {MAX_REDIRECTS} redirects.")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _allowed_host(url: str, kind: str, policy: MediaPolicy) -> str:
    """The host, if it is on the list. What two readers of the URL might read differently is refused."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{kind}: the URL cannot be read: {error}.") from error
    odd = any(char.isspace() or not char.isprintable() or char == "\\" for char in url)
    if parts.scheme.lower() not in ("http", "https") or not host or odd or "@" in parts.netloc:
        raise UsageError(f"{kind}: the URL must be http(s)://host/…, without user, spaces or backslashes.")
    if host.lower() not in policy.domains:
        raise UsageError(
            f"{kind}: media of {host} are not fetched.",
            hint="The hosts that are allowed are given as allowed_media_domains; a data URL needs none.",
        )
    return host


def _body(answer: Any, kind: str, host: str, policy: MediaPolicy, deadline: float) -> bytes:
    limit, size = policy.max_bytes, 0
    chunks: list[bytes] = []
    length = answer.headers.get("Content-Length") or ""
    while size <= limit and not (length.isdigit() and int(length) > limit):
        if time.monotonic() > deadline:
            raise UsageError(f"{kind}: {host} took more than {TOTAL_TIMEOUT:g} seconds.")
        chunk = answer.read1(_CHUNK)
        if not chunk:
            if length.isdigit() and size < int(length):
                raise UsageError(f"{kind}: {host} sent {size} of {length} bytes.")
            return b"".join(chunks)
        chunks.append(chunk)
        size += len(chunk)
    raise UsageError(f"{kind}: what {host} sends is larger than {limit // 2**20} MiB, the most that is read.")
