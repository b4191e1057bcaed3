"""A small hub on this machine, for tests: the HTTP API that downloads use, with repositories held in memory.

with LocalHub() as hub:
    commit = hub.repo("org/name").commit({"config.json": b"{}"})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".lfs")


@dataclass(frozen=True)
class Request:
    """One request the hub received. ``token`` is what the Authorization header carried, None if it was absent."""

    method: str
    path: str
    token: str | None


@dataclass
class Repo:
    """A repository: commits with all their files, and the branches and tags that point to them.

    Args:
        private: without a token that may read it, the hub denies that it exists.
        gated: its listing is public, its files need a token that may read it.
        readers: the tokens that may read it.
    """

    repo_id: str
    private: bool = False
    gated: bool = False
    readers: tuple[str, ...] = ()
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes | str | None], branch: str = "main") -> str:
        """Add a commit on a branch: these files over those that were there; None removes. Returns its 40 hex digits."""
        content = dict(self.commits.get(self.refs.get(branch, ""), {}))
        for name, value in files.items():
            if value is None:
                content.pop(name, None)
            else:
                content[name] = value.encode() if isinstance(value, str) else value
        digest = hashlib.sha1(f"{self.repo_id}:{branch}:{len(self.commits)}".encode())
        for name in sorted(content):
            digest.update(name.encode() + hashlib.sha1(content[name]).digest())
        self.commits[digest.hexdigest()] = content
        self.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def tag(self, name: str, commit: str) -> None:
        self.refs[name] = commit

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a tag, a commit, or the beginning of one."""
        if revision in self.refs:
            return self.refs[revision]
        begun = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return begun[0] if len(begun) == 1 else None


@dataclass
class Fault:
    """Something that goes wrong: for requests whose path contains ``part``, the next ``times`` times."""

    part: str
    times: int
    status: int | None = None
    cut_after: int | None = None
    alter: Callable[[bytes], bytes] | None = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hangs up is part of the tests
            super().handle_error(request, client_address)


class LocalHub:
    """The server. ``tokens`` are those the hub knows; any other is answered 401.

    As on the real hub, an anonymous request for what does not exist is answered 401, one with a token 404.
    """

    def __init__(self, tokens: tuple[str, ...] = ()) -> None:
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.extra_tree_entries: list[dict[str, Any]] = []
        #: Entries in one answer of a tree listing; the real hub's is 1,000.
        self.page_size = 1000
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repo(self, repo_id: str, **settings: Any) -> Repo:
        """The repository of this name, made at the first call (``settings`` are those of `Repo`)."""
        if repo_id not in self.repos:
            self.repos[repo_id] = Repo(repo_id, **settings)
        return self.repos[repo_id]

    def fail(self, part: str, status: int, times: int = 1_000_000) -> None:
        """Answer this status for paths that contain ``part``."""
        self._faults.append(Fault(part, times, status=status))

    def cut(self, part: str, after: int, times: int = 1) -> None:
        """Close the connection after this many bytes of the body."""
        self._faults.append(Fault(part, times, cut_after=after))

    def alter(self, part: str, change: Callable[[bytes], bytes], times: int = 1_000_000) -> None:
        """Send another body than the listing announces."""
        self._faults.append(Fault(part, times, alter=change))

    def fault(self, path: str) -> Fault | None:
        """The fault that this path meets now, used up once."""
        with self._lock:
            for fault in self._faults:
                if fault.part in path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def downloads(self) -> list[str]:
        """The names of the files whose content was sent, in order."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        return [path.split("/", 5)[5] for path in paths if "/resolve/" in path or path.startswith("/cdn/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        header = self.headers.get("Authorization")
        token = header.removeprefix("Bearer ") if header else None
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, token))
        fault = self.hub.fault(path) if self.command == "GET" else None
        if fault and fault.status:
            self._send(fault.status, b"trouble")
        elif path.startswith("/cdn/"):
            self._file(path.split("/", 5)[2:], fault, redirected=True)
        elif token is not None and token not in self.hub.tokens:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), token)
        elif "/resolve/" in path:
            self._resolve(path, token, fault)
        else:
            self._send(404, b"")

    def _api(self, path: str, token: str | None) -> None:
        repo_id, _, rest = path.partition("/revision/") if "/revision/" in path else path.partition("/tree/")
        repo = self._repo(repo_id, token)
        if repo is None:
            return
        commit = repo.resolve(rest or "main")
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {rest}")
        elif "/tree/" in path:
            entries = [_entry(name, content) for name, content in sorted(repo.commits[commit].items())]
            self._page(entries + self.hub.extra_tree_entries)
        else:
            self._json({"id": repo_id, "modelId": repo_id, "sha": commit, "private": repo.private})

    def _page(self, entries: list[dict[str, Any]]) -> None:
        """A part of a listing, and where the next one is."""
        url = urlsplit(self.path)
        begin = int(parse_qs(url.query).get("cursor", ["0"])[0])
        end = begin + self.hub.page_size
        more = end < len(entries)
        link = {"Link": f'<{self.hub.url}{url.path}?recursive=true&cursor={end}>; rel="next"'} if more else {}
        self._json(entries[begin:end], link)

    def _resolve(self, path: str, token: str | None, fault: Fault | None) -> None:
        repo_id, _, rest = path.removeprefix("/").partition("/resolve/")
        repo = self._repo(repo_id, token)
        if repo is None:
            return
        if repo.gated and token not in repo.readers:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {repo_id} is restricted")
            return
        revision, _, name = rest.partition("/")
        commit = repo.resolve(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif name not in repo.commits[commit]:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif name.endswith(_LFS_SUFFIXES):
            self._redirect(repo_id, commit, name, repo.commits[commit][name])
        else:
            self._file([*repo_id.split("/"), commit, name], fault)

    def _repo(self, repo_id: str, token: str | None) -> Repo | None:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and token not in repo.readers):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _redirect(self, repo_id: str, commit: str, name: str, content: bytes) -> None:
        headers = {
            "Location": f"{self.hub.url}/cdn/{repo_id}/{commit}/{name}",
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(302, b"", headers)

    def _file(self, parts: list[str], fault: Fault | None, redirected: bool = False) -> None:
        owner, repo_name, commit, name = parts
        content = self.hub.repos[f"{owner}/{repo_name}"].commits[commit][name]
        identity = hashlib.sha256(content).hexdigest() if redirected else _git_oid(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{identity}"', "Accept-Ranges": "bytes"}
        if fault and fault.alter:
            content = fault.alter(content)
        status, start = 200, self._range_start()
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        self._send(status, content, headers, cut_after=fault.cut_after if fault else None)

    def _range_start(self) -> int:
        value = self.headers.get("Range", "")
        return int(value.removeprefix("bytes=").partition("-")[0]) if value.startswith("bytes=") else 0

    def _json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, cut_after: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut_after is None else body[:cut_after])
        if cut_after is not None:
            self.close_connection = True


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    """One file of a tree listing, with what large file storage adds to it."""
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_oid(content)}
    if name.endswith(_LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry
