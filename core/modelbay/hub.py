"""Talking to the hub: which commit a revision is, what a commit holds, and getting files of it into the cache.

huggingface_hub does the transfers. What it leaves open is done here: one commit for all files, sizes and checksums
verified, and the errors of `modelbay.errors`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.parse import quote

from modelbay.errors import RevisionNotFoundError, SourceError, UsageError
from modelbay.hub_cache import COMMIT, CachedRepo, FileInfo, Tree, is_safe_name
from modelbay.hub_errors import Asked, translated

_WORKERS = 8
_CHECK_ENDPOINT = "Check HF_ENDPOINT: is it a hub?"


def is_offline() -> bool:
    """Whether the user forbade network calls (``HF_HUB_OFFLINE``, or Transformers' older name for it)."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.strip().upper() in ("1", "ON", "YES", "TRUE")


def endpoint() -> str:
    """The hub's address: ``HF_ENDPOINT``, else huggingface_hub's default. Read at each call, so that it can change."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def token() -> str | bool | None:
    """``HF_TOKEN`` without surrounding whitespace; False (anonymous) if set but empty; None (stored login) if unset."""
    value = os.environ.get("HF_TOKEN")
    if value is None:
        return None
    value = value.strip()
    if any(not 32 < ord(character) < 127 for character in value):
        # The HTTP client would refuse it too, but its message would print it.
        raise UsageError("HF_TOKEN holds characters that no token has.", hint="Copy it again, without line breaks.")
    return value or False


def resolve_commit(repo_id: str, revision: str) -> str:
    """The commit that a branch, tag or commit is now, by one request.

    Raises:
        RevisionNotFoundError, ModelNotFoundError, AuthenticationError, GatedModelError, OfflineError: BEHAVIOUR S4.
    """
    with translated(Asked(repo_id, revision, endpoint())):
        answer = next(_get(f"/api/models/{repo_id}/revision/{quote(revision, safe='')}"))
    commit = answer.get("sha") if isinstance(answer, dict) else None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise SourceError(f"{endpoint()} did not say which commit {revision!r} of {repo_id} is.", hint=_CHECK_ENDPOINT)
    if COMMIT.fullmatch(revision) and commit != revision:
        raise RevisionNotFoundError(
            f"asked for commit {revision} of {repo_id}, {endpoint()} answered with commit {commit}.",
            hint=_CHECK_ENDPOINT,
        )
    return commit


def list_tree(repo_id: str, commit: str) -> dict[str, FileInfo]:
    """Every file of a commit. Names that would leave the directory they are stored in are refused."""
    tree: dict[str, FileInfo] = {}
    with translated(Asked(repo_id, commit, endpoint())):
        for page in _get(f"/api/models/{repo_id}/tree/{commit}", recursive="true", expand="false"):
            for entry in page:
                if entry["type"] != "file":
                    continue
                if not is_safe_name(entry["path"]):
                    raise SourceError(f"{repo_id} lists a file named {entry['path']!r}, which would leave the cache.")
                lfs = entry.get("lfs") or {}
                tree[entry["path"]] = FileInfo(lfs.get("size", entry["size"]), entry.get("oid") or "", lfs.get("oid"))
    return tree


def _get(path: str, **params: str) -> Iterator[Any]:
    """GET a JSON resource, page by page. Server errors are tried twice more; a dead server fails at once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url: str | None = endpoint() + path
    headers = build_hf_headers(token=token(), library_name="modelbay")
    while url:
        response = http_backoff(
            "GET",
            url,
            params=params or None,
            headers=headers,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
            max_retries=2,
            base_wait_time=0.5,
            retry_on_exceptions=(),
            retry_on_status_codes=(429, 500, 502, 503, 504),
        )
        hf_raise_for_status(response)
        yield response.json()
        url, params = response.links.get("next", {}).get("url"), {}


def download(repo_id: str, cached: CachedRepo, commit: str, names: Sequence[str], tree: Tree) -> None:
    """Get these files of one commit into the cache, several at a time, with progress bars.

    A file that is on disk with the wrong size is fetched again. A file whose size or checksum differs from the
    listing is removed from the cache again.

    Raises:
        SourceError and its kinds; no truncated file is left behind, whatever happens.
    """
    stop = threading.Event()
    _check_space(cached, names, tree)
    bar = _stoppable_bar(stop)
    pool = ThreadPoolExecutor(max_workers=min(_WORKERS, len(names)), thread_name_prefix="modelbay-download")
    try:
        tasks = [pool.submit(_download_one, repo_id, cached, commit, name, tree.get(name), bar) for name in names]
        for task in as_completed(tasks):
            task.result()
    finally:
        # The first error, or Ctrl-C, ends the transfers still running: their bars raise at the next chunk.
        stop.set()
        pool.shutdown(cancel_futures=True)


def _download_one(repo_id: str, cached: CachedRepo, commit: str, name: str, info: FileInfo | None, bar: Any) -> None:
    from huggingface_hub import hf_hub_download

    target = cached.snapshot(commit) / name
    needed = info.size if info else None
    with translated(Asked(repo_id, commit, endpoint(), name, cached.directory.parent, needed)):
        hf_hub_download(
            repo_id,
            name,
            revision=commit,
            cache_dir=cached.directory.parent,
            endpoint=endpoint(),
            token=token(),
            tqdm_class=bar,
            force_download=target.exists(),
            library_name="modelbay",
        )
    if not target.exists():
        raise SourceError(f"{endpoint()} answered with {name} of another commit than {commit}.", hint=_CHECK_ENDPOINT)
    if info is not None:
        _verify(repo_id, target, info)


def _verify(repo_id: str, path: Path, info: FileInfo) -> None:
    size = path.stat().st_size
    if size != info.size:
        found = f"has {size} bytes, {info.size} were announced"
    elif info.sha256 and _sha256(path) != info.sha256:
        found = "has another SHA-256 than was announced"
    else:
        return
    blob = path.resolve()
    path.unlink()
    blob.unlink(missing_ok=True)
    raise SourceError(
        f"the download of {path.name} from {repo_id} {found}; it was removed from the cache.",
        hint="Run again; if it repeats, a proxy on the way damages files.",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(cached: CachedRepo, names: Sequence[str], tree: Tree) -> None:
    """An error before the first byte if the disk cannot hold these files."""
    blobs = {cached.blob(tree[name]): tree[name].size for name in names if name in tree}
    needed = sum(size for blob, size in blobs.items() if not blob.exists())
    existing = next(path for path in (cached.directory, *cached.directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise SourceError(
            f"the download needs {needed:,} bytes, the disk of {cached.directory.parent} has {free:,} free.",
            hint="Free some space, or point HF_HUB_CACHE to another disk.",
        )


def _stoppable_bar(stop: threading.Event) -> Any:
    """huggingface_hub's progress bar, as a class whose bars end their transfer when ``stop`` is set."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise InterruptedError("the download was stopped")
            return super().update(n)

    return Bar
