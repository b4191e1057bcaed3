"""The page for browsers: files that are served as they are, and what a browser may do with them."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

#: Nothing but this server's own files and routes; no script in the markup, and no text that becomes markup.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asks each time, so that no file is older than the server
}
#: Said here, since what the system takes .js for differs, and browsers run no module of another type.
_TYPES = {".js": "text/javascript; charset=utf-8"}


class PageFiles(StaticFiles):
    """A directory of files, with an index.html, as a page that reaches nothing but its own server."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        kind = _TYPES.get(Path(path).suffix)
        if kind is not None and "content-type" in response.headers:
            response.headers["Content-Type"] = kind
        return response


def mount_page(app: FastAPI, page: Path) -> set[str]:
    """Serve the page's files, where there are any; their paths are returned."""
    if not (page / "index.html").is_file():
        return set()
    paths = {"/", *(f"/{path.relative_to(page).as_posix()}" for path in page.rglob("*") if path.is_file())}
    app.router.routes.append(_PageMount(PageFiles(directory=page, html=True), paths))
    return paths


class _PageMount(Mount):
    """At ``/``, and only there where a file is: a route that is asked with the wrong method says so itself."""

    def __init__(self, app: ASGIApp, paths: set[str]) -> None:
        super().__init__("/", app, name="page")
        self._paths = paths

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if scope["path"] in self._paths else (Match.NONE, {})
